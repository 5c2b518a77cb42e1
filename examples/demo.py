"""`make demo`: many lunar landers on all cores of this machine, flown by an autopilot that runs beside them.

First a few hundred steps are checked, bit for bit, against Gymnasium's own SyncVectorEnv; then the workers fly.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from clusterenv import ClusterEnv, Rollout

ENV_ID = "LunarLander-v3"


def autopilot(obs: NDArray[np.float32]) -> NDArray[np.int64]:
    """Fly every lander with a hand-made controller: lean against sideways drift, brake the fall near the ground."""
    x, y, x_speed, y_speed, angle, spin, left_leg, right_leg = obs.T
    on_ground = (left_leg > 0) | (right_leg > 0)
    wanted_angle = np.clip(0.5 * x + x_speed, -0.4, 0.4)
    turn = np.where(on_ground, 0.0, 0.5 * (wanted_angle - angle) - spin)
    lift = np.where(on_ground, -0.5 * y_speed, 0.5 * (0.55 * np.abs(x) - y) - 0.5 * y_speed)
    main, left, right = 2, 1, 3
    return np.where(
        (lift > np.abs(turn)) & (lift > 0.05), main, np.where(turn < -0.05, right, np.where(turn > 0.05, left, 0))
    )


def check_against_gymnasium(num_envs: int, num_steps: int = 200) -> float:
    """Step ClusterEnv and SyncVectorEnv side by side with the same seeds and actions; returns the latter's steps/s."""
    reference = gym.vector.SyncVectorEnv([lambda: gym.make(ENV_ID)] * num_envs)
    with ClusterEnv(ENV_ID, num_envs=num_envs) as envs:
        obs, _ = envs.reset(seed=0)
        expected, _ = reference.reset(seed=0)
        seconds = 0.0
        for _ in range(num_steps):
            if not np.array_equal(obs, expected):
                raise SystemExit("The two differ: please report this as a bug.")
            actions = autopilot(obs)
            obs, *_ = envs.step(actions)
            started = time.perf_counter()
            expected, *_ = reference.step(actions)
            seconds += time.perf_counter() - started
    reference.close()
    return num_envs * num_steps / seconds


class Progress:
    """A line that is rewritten in a terminal, and a new line now and then where there is none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started = time.perf_counter()
        self._is_terminal = sys.stdout.isatty()
        self._last_line = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def show(self, text: str, *, is_last: bool = False) -> None:
        """Show the state of things."""
        share = min(1.0, self.elapsed / self._seconds)
        line = f"[{'#' * int(28 * share):<28}] {share:4.0%}  {text}"
        if self._is_terminal:
            print(f"\r{line:<110}", end="\n" if is_last else "", flush=True)
        elif is_last or self.elapsed - self._last_line > 2.0:
            self._last_line = self.elapsed
            print(line, flush=True)


def fly(num_envs: int, seconds: float) -> tuple[float, list[float], dict[str, Any]]:
    """Collect rollouts for a while; returns steps/s, the episodes' returns, and the run's stats."""
    returns: list[float] = []
    num_steps = 0
    with ClusterEnv(ENV_ID, num_envs=num_envs) as envs:
        envs.reset(seed=1)
        envs.rollout(autopilot, num_steps=8)
        progress = Progress(seconds)
        while progress.elapsed < seconds:
            rollout: Rollout = envs.rollout(autopilot, num_steps=64)
            num_steps += rollout.num_steps * rollout.num_envs
            returns += rollout.episodes.returns.tolist()
            recent = f"{np.mean(returns[-100:]):6.1f}" if returns else "     -"
            progress.show(
                f"{num_steps / progress.elapsed:8,.0f} steps/s   {len(returns):5d} landings   return {recent}",
                is_last=progress.elapsed >= seconds,
            )
        return num_steps / progress.elapsed, returns, {**envs.stats, "workers": envs.num_workers}


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64, help="how many landers (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long to fly (default: %(default)s)")
    options = parser.parse_args()
    try:
        print(f"1. The same seeds and actions in ClusterEnv and in SyncVectorEnv ({options.num_envs} landers) ...")
        reference = check_against_gymnasium(options.num_envs)
        print(f"   Equal, bit for bit. SyncVectorEnv alone makes {reference:,.0f} steps/s in one process.\n")
        print("2. The autopilot moves onto the workers, beside the landers: one message per 64 steps.")
        speed, returns, stats = fly(options.num_envs, options.seconds)
    except KeyboardInterrupt:
        raise SystemExit("\nStopped. The workers have ended.") from None
    landed = np.mean(np.array(returns) > 100) if returns else 0.0
    print(f"""
{stats["env_steps"]:,} steps and {len(returns):,} landings on {stats["workers"]} workers, {landed:.0%} of them safe.
{speed:,.0f} steps/s: {speed / reference:.1f} times SyncVectorEnv. Idle: {stats["worker_idle_share"]:.0%} of the time.
Next: README.md has the 15 lines that do this for your own environments, and docs/policies.md for your own agent.""")


if __name__ == "__main__":
    main()
