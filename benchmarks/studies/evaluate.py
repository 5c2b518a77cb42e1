"""How fast episodes are evaluated: `python -m benchmarks.studies.evaluate`.

500 episodes of LunarLander with CleanRL's 64-64 agent: `envs.evaluate` on two workers, beside what the same workers
make in rollouts, Stable-Baselines3's `evaluate_policy`, and a loop such as CleanRL's scripts evaluate with, with one
environment. Episodes end at different times, so at the end of an evaluation there is nothing to keep all environments
busy with: its speed is taken until 95 % of the episodes are over, and as a whole. In every round all are measured one
after another. Prints one table and writes it to `benchmarks/results/evaluate.md`. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.agents import MlpAgent
from benchmarks.page import publish
from benchmarks.processes import ROOT
from clusterenv import ClusterEnv

ENV = "LunarLander-v3"
NUM_ENVS, NUM_WORKERS = 16, 2
ROLLOUT_STEPS = 128
AT_LEAST = 0.9
ROLLOUT, EARLY = "rollout", "evaluate, until 95 % of the episodes are over"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.evaluate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=500, help="of each evaluation (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often all are measured (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of rollouts in a round (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "evaluate.md", help="where to write"
    )
    arguments = parser.parse_args(argv)
    load = os.getloadavg()[0]
    torch.manual_seed(1)
    torch.set_num_threads(1)
    agent = MlpAgent(8, 4)
    speeds: dict[str, list[float]] = {}
    with ClusterEnv(ENV, NUM_ENVS, num_workers=NUM_WORKERS) as envs:
        envs.reset(seed=1)
        envs.rollout(agent, ROLLOUT_STEPS)
        envs.evaluate(agent, NUM_ENVS)  # Makes the environments.
        for _ in range(arguments.rounds):
            note(speeds, ROLLOUT, measure_rollouts(envs, agent, arguments.seconds))
            until, whole = measure_evaluation(envs, agent, arguments.episodes)
            note(speeds, EARLY, until)
            note(speeds, "evaluate, as a whole", whole)
            some = max(1, arguments.episodes // 5)
            note(speeds, f"Stable-Baselines3, {NUM_WORKERS} processes", measure_sb3(some, has_processes=True))
            note(speeds, f"Stable-Baselines3, {NUM_ENVS} environments", measure_sb3(some, has_processes=False))
            note(speeds, "CleanRL's loop, 1 environment", measure_cleanrl(agent, max(1, arguments.episodes // 10)))
    rollout, early = (np.array(speeds[name]) for name in (ROLLOUT, EARLY))
    ratio = float(np.median(early / rollout))
    verdict = f"At least {AT_LEAST} of the rollouts' speed until 95 % are over: {ratio:.2f}, "
    verdict += "reached" if ratio >= AT_LEAST else "missed"
    publish(render(speeds, arguments.episodes, verdict), load, arguments.out)
    return 0


def measure_rollouts(envs: ClusterEnv, agent: torch.nn.Module, seconds: float) -> float:
    """Return steps per second."""
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        envs.rollout(agent, ROLLOUT_STEPS)
        count += ROLLOUT_STEPS * NUM_ENVS
    return count / (time.perf_counter() - started)


def measure_evaluation(envs: ClusterEnv, agent: torch.nn.Module, episodes: int) -> tuple[float, float]:
    """Return steps per second until 95 % of the episodes are over, and of the whole."""
    enough = int(0.95 * episodes)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "eval.jsonl"
        reached_s = [0.0]
        started = time.perf_counter()
        watch = threading.Thread(target=wait_for_lines, args=(path, enough + 1, started, reached_s))
        watch.start()
        evaluation = envs.evaluate(agent, episodes, resume=path)
        seconds = time.perf_counter() - started
        watch.join()
        lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    # Steps of episodes that are still under way then are not counted: what is made is, if anything, more.
    return sum(line["length"] for line in lines[:enough]) / reached_s[0], int(evaluation.lengths.sum()) / seconds


def wait_for_lines(path: Path, count: int, started: float, reached_s: list[float]) -> None:
    """Note when a file has so many lines."""
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        time.sleep(0.02)
    reached_s[0] = time.perf_counter() - started


def measure_sb3(episodes: int, *, has_processes: bool) -> float:
    """Return steps per second of Stable-Baselines3, with its own 64-64 policy, in as many processes or environments."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

    def make() -> gym.Env[Any, Any]:
        return gym.make(ENV)

    venv: VecEnv = SubprocVecEnv([make] * NUM_WORKERS, "fork") if has_processes else DummyVecEnv([make] * NUM_ENVS)
    model = PPO("MlpPolicy", gym.make(ENV), device="cpu", seed=1)
    started = time.perf_counter()
    lengths: Any = evaluate_policy(
        model, venv, n_eval_episodes=episodes, deterministic=False, return_episode_rewards=True, warn=False
    )[1]
    seconds = time.perf_counter() - started
    venv.close()
    return float(sum(lengths) / seconds)


def measure_cleanrl(agent: Any, episodes: int) -> float:
    """Return steps per second of a loop such as CleanRL's `evals` have: one environment, one action at a time."""
    envs = gym.vector.SyncVectorEnv([lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(ENV))])
    obs, _ = envs.reset(seed=1)
    started, steps, done = time.perf_counter(), 0, 0
    while done < episodes:
        with torch.no_grad():
            actions = agent.get_action_and_value(torch.Tensor(obs))[0]
        obs, _, _, _, infos = envs.step(actions.numpy())
        steps += 1
        done += "episode" in infos
    seconds = time.perf_counter() - started
    envs.close()
    return steps / seconds


def note(speeds: dict[str, list[float]], name: str, speed: float) -> None:
    """Keep a figure, and show it."""
    speeds.setdefault(name, []).append(speed)
    print(f"{name}: {speed:,.0f} steps/s", file=sys.stderr)


def render(speeds: dict[str, list[float]], episodes: int, verdict: str) -> list[str]:
    """Write the page."""
    first = speeds[ROLLOUT]
    rows = [
        f"| {name} | {np.median(found):,.0f} | {np.median(np.divide(found, first)):.2f} |"
        for name, found in speeds.items()
    ]
    return [
        "# Evaluations",
        "",
        f"Environment steps per second while {episodes} episodes of {ENV} are evaluated, and those of rollouts with "
        "the same workers. Medians over the rounds. Made by `python -m benchmarks.studies.evaluate`.",
        "",
        "| | steps/s | of the rollouts' |",
        "|---|---:|---:|",
        *rows,
        "",
        f"{verdict}.",
        "",
        f"- {NUM_WORKERS} workers, {NUM_ENVS} environments, a 64-64 agent that was not trained and draws its actions",
        f"- {len(first)} rounds; Stable-Baselines3 with a fifth of the episodes, CleanRL's loop with a tenth",
    ]


if __name__ == "__main__":
    sys.exit(main())
