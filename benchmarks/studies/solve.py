"""How long until LunarLander is solved, with one PPO and its execution swapped: `python -m benchmarks.studies.solve`.

The learner, its settings and its seeds are the same for all; only what steps the environments differs: Gymnasium's
SyncVectorEnv and AsyncVectorEnv, Stable-Baselines3's SubprocVecEnv, and ClusterEnv by `step`, `rollout` and `stream`.
Solved is a mean return of 200 over the last 100 episodes. Every run is a process of its own, and is kept in
`.bench/solve`: a run that was interrupted goes on where it was, and only what is missing is run. Prints one table and
writes it, with the curves over seconds, to `benchmarks/results`. Run it on an otherwise idle machine.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.agents import MlpAgent
from benchmarks.page import publish
from benchmarks.processes import ROOT
from benchmarks.progress import Progress
from clusterenv import ClusterEnv

TASK = "LunarLander-v3"
SOLVED, WINDOW = 200.0, 100
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / ".bench" / "solve"
POINTS = 200  # Of a curve.


@dataclass(frozen=True, kw_only=True)
class Settings:
    """PPO's. What a run was made with is kept beside it; another value makes it another run."""

    num_envs: int = 32
    num_steps: int = 128
    max_env_steps: int = 2_000_000
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    update_epochs: int = 4
    minibatch_size: int = 512
    reward_scale: float = 0.05
    max_weight: float = 5.0


@dataclass(frozen=True)
class Batch:
    """What one update learns from: arrays `[T, N]`, and the returns of the episodes that ended in it, in order."""

    obs: NDArray[np.float32]
    next_obs: NDArray[np.float32]  # What each action really led to.
    actions: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    done: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    returns: list[float]


Execution = Callable[[MlpAgent, int, Settings], Iterator[Batch]]


def by_gymnasium(make: Callable[[Settings], Any]) -> Execution:
    """Return the execution by a vector environment of Gymnasium's kind, with actions from the learner's process."""

    def run(agent: MlpAgent, seed: int, settings: Settings) -> Iterator[Batch]:
        envs = make(settings)
        obs, _ = envs.reset(seed=seed)
        running, was_done = np.zeros(settings.num_envs), np.zeros(settings.num_envs, np.bool_)
        try:
            while True:
                rows: list[tuple[Any, ...]] = []
                returns: list[float] = []
                for _ in range(settings.num_steps):
                    actions, logprobs = choose(agent, obs)
                    next_obs, rewards, terminated, truncated, _ = envs.step(actions)
                    done = terminated | truncated
                    # The step after an episode's last resets, and its action is ignored.
                    rows.append((obs, next_obs, actions, logprobs, rewards, terminated, done, ~was_done))
                    running += rewards
                    returns += running[done].tolist()
                    running[done] = 0.0
                    obs, was_done = next_obs, done
                yield stack(rows, returns)
        finally:
            envs.close()

    return run


def by_sb3(agent: MlpAgent, seed: int, settings: Settings) -> Iterator[Batch]:
    """Step SubprocVecEnv, which resets in the very step that ends an episode and has its end in the infos."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv([lambda: gym.make(TASK)] * settings.num_envs, start_method="forkserver")
    envs.seed(seed)
    obs: Any = envs.reset()
    running = np.zeros(settings.num_envs)
    everywhere = np.ones(settings.num_envs, np.bool_)
    try:
        while True:
            rows: list[tuple[Any, ...]] = []
            returns: list[float] = []
            for _ in range(settings.num_steps):
                actions, logprobs = choose(agent, obs)
                shown, rewards, done, infos = envs.step(actions)
                next_obs, truncated = np.array(shown), np.zeros(settings.num_envs, np.bool_)
                for index in np.flatnonzero(done):
                    next_obs[index] = infos[index]["terminal_observation"]
                    truncated[index] = infos[index]["TimeLimit.truncated"]
                rows.append((obs, next_obs, actions, logprobs, rewards, done & ~truncated, done, everywhere))
                running += rewards
                returns += running[done].tolist()
                running[done] = 0.0
                obs = shown
            yield stack(rows, returns)
    finally:
        envs.close()


def by_rollout(agent: MlpAgent, seed: int, settings: Settings) -> Iterator[Batch]:
    """Let the workers choose, with the newest weights."""
    with ClusterEnv(TASK, settings.num_envs) as envs:
        envs.reset(seed=seed)
        while True:
            yield as_batch(envs.rollout(agent, settings.num_steps, extras=("logprob",)))


def by_stream(agent: MlpAgent, seed: int, settings: Settings) -> Iterator[Batch]:
    """Let the workers go on while the learner learns."""
    with ClusterEnv(TASK, settings.num_envs) as envs:
        envs.reset(seed=seed)
        options: dict[str, Any] = {"min_envs": settings.num_envs, "in_flight": 1, "extras": ("logprob",)}
        with envs.stream(agent, settings.num_steps, **options) as stream:
            yield from map(as_batch, stream)


EXECUTIONS: dict[str, tuple[str, Execution]] = {
    "sync": (
        "Gymnasium SyncVectorEnv",
        by_gymnasium(lambda settings: gym.vector.SyncVectorEnv([lambda: gym.make(TASK)] * settings.num_envs)),
    ),
    "async": (
        "Gymnasium AsyncVectorEnv",
        by_gymnasium(lambda settings: gym.vector.AsyncVectorEnv([lambda: gym.make(TASK)] * settings.num_envs)),
    ),
    "sb3": ("SB3 SubprocVecEnv", by_sb3),
    "step": ("ClusterEnv, step", by_gymnasium(lambda settings: ClusterEnv(TASK, settings.num_envs))),
    "rollout": ("ClusterEnv, rollout", by_rollout),
    "stream": ("ClusterEnv, stream", by_stream),
}


def choose(agent: MlpAgent, obs: Any) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw actions in the learner's process."""
    with torch.no_grad():
        actions, logprobs, _, _ = agent.get_action_and_value(torch.as_tensor(obs))
    return actions.numpy(), logprobs.numpy()


def stack(rows: Sequence[tuple[Any, ...]], returns: list[float]) -> Batch:
    """Put the steps of a batch together."""
    obs, next_obs, actions, logprobs, rewards, terminated, done, valid = (
        np.stack(column) for column in zip(*rows, strict=True)
    )
    return Batch(obs, next_obs, actions, logprobs, rewards.astype(np.float32), terminated, done, valid, returns)


def as_batch(rollout: Any) -> Batch:
    """Read a rollout, whose rows follow each other."""
    order = np.argsort(rollout.episodes.steps, kind="stable")
    return Batch(
        rollout.obs,
        np.concatenate([rollout.obs[1:], rollout.next_obs[None]]),
        rollout.actions,
        rollout.logprob,
        rollout.rewards.astype(np.float32),
        rollout.terminations,
        rollout.terminations | rollout.truncations,
        rollout.valid,
        rollout.episodes.returns[order].tolist(),
    )


def learn(agent: MlpAgent, optimizer: torch.optim.Optimizer, batch: Batch, settings: Settings) -> None:
    """Improve the agent once: PPO, decoupled, which is plain PPO where the newest policy made the data."""
    obs, next_obs, actions = (torch.as_tensor(part) for part in (batch.obs, batch.next_obs, batch.actions))
    rewards, behaviour = torch.as_tensor(batch.rewards), torch.as_tensor(batch.logprobs)
    terminated, done, valid = (torch.as_tensor(part) for part in (batch.terminated, batch.done, batch.valid))
    advantages = torch.zeros_like(rewards)
    with torch.no_grad():
        values, next_values = agent.critic(obs)[..., 0], agent.critic(next_obs)[..., 0]
        anchor = agent.get_action_and_value(obs, actions)[1]
        weights = (anchor - behaviour).exp().clamp(max=settings.max_weight)
        errors = settings.reward_scale * rewards + settings.gamma * ~terminated * next_values - values
        ahead = torch.zeros_like(errors[0])
        for t in reversed(range(len(errors))):
            advantages[t] = ahead = errors[t] + settings.gamma * settings.gae_lambda * ~done[t] * ahead
    rows = [part[valid] for part in (obs, actions, anchor, weights, advantages, advantages + values)]
    for _ in range(settings.update_epochs):
        for part in torch.randperm(len(rows[0])).tensor_split(max(1, len(rows[0]) // settings.minibatch_size)):
            x, action, old, weight, advantage, target = (array[part] for array in rows)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            _, logprob, entropy, value = agent.get_action_and_value(x, action)
            ratio = (logprob - old).exp()
            gain = weight * torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -gain.mean() + 0.25 * (value[:, 0] - target).square().mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Train until it is solved, or the steps are used up; returns what is kept of the run."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)  # For everybody.
    agent = MlpAgent(8, 4)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5)
    returns: list[float] = []
    curve: list[tuple[float, int, float]] = []
    began = time.monotonic()
    batches = EXECUTIONS[name][1](agent, seed, settings)
    for batch in batches:
        if not curve:  # Starting processes is no part of the question, and told apart.
            started_s, began = time.monotonic() - began, time.monotonic()
        returns += batch.returns
        learn(agent, optimizer, batch, settings)
        mean = float(np.mean(returns[-WINDOW:])) if returns else float("nan")
        env_steps = (len(curve) + 1) * batch.rewards.size
        curve.append((time.monotonic() - began, env_steps, mean))
        is_solved = len(returns) >= WINDOW and mean >= SOLVED
        if is_solved or env_steps >= settings.max_env_steps:
            break
    batches.close()  # type: ignore[attr-defined]  # all of them are generators, which end their processes
    return {
        "settings": asdict(settings),
        "name": name,
        "seed": seed,
        "is_solved": is_solved,
        "first_batch_s": started_s,
        "curve": curve,
    }


def run_missing(names: Sequence[str], seeds: Sequence[int], settings: Settings, cache: Path) -> list[dict[str, Any]]:
    """Run what is not there yet, one seed of everybody after the other, so that slow hours are shared."""
    progress = Progress()
    runs = []
    for seed, name in itertools.product(seeds, names):
        path = cache / f"{name}-{seed}.json"
        if path.exists() and (kept := json.loads(path.read_text()))["settings"] == asdict(settings):
            runs.append(kept)
            continue
        progress.update(f"{EXECUTIONS[name][0]}, seed {seed}")
        command = [sys.executable, "-m", "benchmarks.studies.solve", "--only", name, "--seeds", str(seed)]
        command += ["--cache", str(cache)]
        for field in fields(settings):
            command += [f"--{field.name.replace('_', '-')}", str(getattr(settings, field.name))]
        subprocess.run(command, cwd=ROOT, check=True)
        runs.append(json.loads(path.read_text()))
        seconds, env_steps, mean = runs[-1]["curve"][-1]
        progress.say(f"{EXECUTIONS[name][0]}, seed {seed}: {mean:.0f} after {seconds:.0f} s, {env_steps:,} steps")
    return runs


def make_table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Lay out the page's table: medians over the seeds; a run that was not solved counts as infinitely long."""
    lines = ["| | seconds until solved | least to most | environment steps | steps/s, learning included | solved |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for name, (title, _) in EXECUTIONS.items():
        own = [run for run in runs if run["name"] == name]
        if not own:
            continue
        times = [run["curve"][-1][0] if run["is_solved"] else float("inf") for run in own]
        steps = statistics.median(run["curve"][-1][1] for run in own)
        speed = statistics.median(run["curve"][-1][1] / run["curve"][-1][0] for run in own)
        shown = [f"{value:.0f}" if np.isfinite(value) else "not" for value in (statistics.median(times), min(times))]
        most = f"{max(times):.0f}" if np.isfinite(max(times)) else "not"
        lines.append(
            f"| {title} | {shown[0]} | {shown[1]} to {most} | {steps:,.0f} | {speed:,.0f} | "
            f"{sum(run['is_solved'] for run in own)} of {len(own)} |"
        )
    return lines


def median_curve(runs: Sequence[dict[str, Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the median of the seeds' mean returns over seconds; a run that has ended stays where it was."""
    end = max(run["curve"][-1][0] for run in runs)
    seconds = np.linspace(0.0, end, POINTS)
    each = []
    for run in runs:
        times, _, means = (np.array(column, float) for column in zip(*run["curve"], strict=True))
        each.append(np.interp(seconds, times, np.nan_to_num(means, nan=float(np.nanmin(means)))))
    return seconds, np.median(each, axis=0)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.5), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for name, (title, _) in EXECUTIONS.items():
        if own := [run for run in runs if run["name"] == name]:
            axes.plot(*median_curve(own), label=title, linewidth=2.2 if title.startswith("ClusterEnv") else 1.2)
    axes.axhline(SOLVED, color="#7a7f87", linestyle="--", linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"mean return of the last {WINDOW} episodes")
    axes.set_title(f"{TASK}: one PPO, its execution swapped; median of the seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def write_curves(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write every point of every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["execution", "seed", "seconds", "env_steps", "mean_return"])
        for run in runs:
            for seconds, env_steps, mean in run["curve"]:
                writer.writerow([run["name"], run["seed"], f"{seconds:.3f}", env_steps, f"{mean:.3f}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="(default: 1 to 5)")
    parser.add_argument("--executions", nargs="+", choices=EXECUTIONS, default=list(EXECUTIONS), help="which")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where table, chart and curves go")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where finished runs are kept")
    parser.add_argument("--only", choices=EXECUTIONS, help=argparse.SUPPRESS)  # Be one of the runs.
    for field in fields(Settings):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help="of PPO")
    arguments = parser.parse_args(argv)
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    arguments.cache.mkdir(parents=True, exist_ok=True)
    if arguments.only:
        kept = arguments.cache / f"{arguments.only}-{arguments.seeds[0]}.json"
        kept.with_suffix(".new").write_text(json.dumps(train(arguments.only, arguments.seeds[0], settings)))
        kept.with_suffix(".new").replace(kept)
        return 0
    load = os.getloadavg()[0]
    runs = run_missing(arguments.executions, arguments.seeds, settings, arguments.cache)
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(runs, arguments.out / "solve.svg")
    write_curves(runs, arguments.out / "solve-curves.csv")
    described = ", ".join(f"{field.name} {getattr(settings, field.name):g}" for field in fields(settings))
    publish(
        [
            f"# Until {TASK} is solved",
            "",
            f"Wall-clock seconds until the mean return of {WINDOW} episodes is {SOLVED:.0f}, from the first batch on. "
            "One PPO, the same settings and seeds; only what steps the environments differs. Made by "
            "`python -m benchmarks.studies.solve`.",
            "",
            *make_table(runs),
            "",
            "![Mean return over seconds, median of the seeds, by execution](solve.svg)",
            "",
            f"- seeds {', '.join(map(str, arguments.seeds))}; {described}",
            "- a run that was not solved counts as longer than all others",
        ],
        load,
        arguments.out / "solve.md",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
