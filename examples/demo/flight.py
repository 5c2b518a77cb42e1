"""Flight: one episode of an agent, and pictures of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from examples.ppo import Agent

Frames = list[NDArray[np.uint8]]
_FRAME_MS = 20  # A step of LunarLander is a fiftieth of a second.
_GROUND_ROWS = 60  # At the bottom there is nothing but ground.


@dataclass(frozen=True)
class Flight:
    """An episode.

    Attributes:
        seed: That its environment was reset with.
        total: The sum of its rewards.
        frames: A picture a step, if it was filmed.
    """

    seed: int
    total: float
    frames: Frames


def fly(env_id: str, agent: Agent, seed: int, *, is_filmed: bool = False) -> Flight:
    """Let the agent fly once, by chance as in training; the same agent and seed always give the same flight."""
    chance = torch.Generator().manual_seed(seed)
    env: gym.Env[Any, Any] = gym.make(env_id, render_mode="rgb_array" if is_filmed else None)
    obs, _ = env.reset(seed=seed)
    total, is_over = 0.0, False
    frames: Frames = []
    while not is_over:
        if is_filmed:
            frames.append(np.asarray(env.render()))
        with torch.no_grad():
            action = int(torch.multinomial(agent.actor(torch.as_tensor(obs)).softmax(-1), 1, generator=chance))
        obs, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        is_over = terminated or truncated
    env.close()
    return Flight(seed, total, frames)


def draw_strip(path: Path, flights: dict[str, Flight], num_exposures: int = 10) -> None:
    """Draw flights beside each other, each as one picture exposed several times, as of a stroboscope."""
    figure = Figure(figsize=(6.2 * len(flights), 3.9), dpi=120, layout="constrained", facecolor="white")
    for axes, (title, flight) in zip(figure.subplots(1, len(flights), squeeze=False)[0], flights.items(), strict=True):
        axes.imshow(expose(flight.frames, num_exposures))
        axes.set_title(f"{title}: return {flight.total:.0f}", fontsize=13)
        axes.set_axis_off()
    figure.savefig(path)


def expose(frames: Frames, num_exposures: int) -> NDArray[np.uint8]:
    """Put frames over each other, the later the brighter: of each pixel the brightest stays, and space is black."""
    picture = np.zeros_like(frames[0])
    for share in np.linspace(0.0, 1.0, num_exposures):
        frame = frames[round(share * (len(frames) - 1))]
        picture = np.maximum(picture, ((0.35 + 0.65 * share) * frame).astype(np.uint8))
    return picture[:-_GROUND_ROWS]


def write_film(path: Path, flight: Flight, every: int = 3) -> None:
    """Write the flight as an animated GIF, in its own time and half its size."""
    pictures: Sequence[Image.Image] = [
        Image.fromarray(frame[:-_GROUND_ROWS:2, ::2]).quantize(32, dither=Image.Dither.NONE)
        for frame in flight.frames[::every]
    ]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=every * _FRAME_MS, loop=0)
