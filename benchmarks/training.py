"""One training run of the learning benchmark, in its own process: `python -m benchmarks.training`.

Four workers of 16 environments, 125 steps a rollout: 8000 environment steps an update.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.agents import MlpAgent
from benchmarks.ppo import Learner, PpoConfig
from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, PeriodicSync, Rollout

NUM_WORKERS = 4
NUM_ENVS = 64
NUM_STEPS = 125
THRESHOLD = 0.05
TASKS = ("CartPole-v1", "Acrobot-v1", "LunarLander-v3")  # Vector observations, discrete actions.


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A sync rule together with the objective of the learner.

    Args:
        label: How tables and figures call it.
        decoupled: Which objective.
        make: Makes the rule; a period is given to those that need one.
    """

    label: str
    decoupled: bool
    make: Callable[[int | None], Any]
    needs_period: bool = False


def make_periodic(period: int | None) -> PeriodicSync:
    """Make the rule that pulls every so many versions."""
    if period is None:
        raise ValueError("The periodic rule needs a period.")
    return PeriodicSync(period)


RULES: Mapping[str, Rule] = {
    "every": Rule(label="EveryUpdate, decoupled PPO", decoupled=True, make=lambda _: EveryUpdate()),
    "adaptive": Rule(
        label=f"AdaptiveSync({THRESHOLD}), decoupled PPO",
        decoupled=True,
        make=lambda _: AdaptiveSync(threshold=THRESHOLD),
    ),
    "periodic": Rule(label="PeriodicSync, decoupled PPO", decoupled=True, make=make_periodic, needs_period=True),
    "periodic-fewer": Rule(label="PeriodicSync, decoupled PPO", decoupled=True, make=make_periodic, needs_period=True),
    "adaptive-bare": Rule(
        label=f"AdaptiveSync({THRESHOLD}, plateau=None), decoupled PPO",
        decoupled=True,
        make=lambda _: AdaptiveSync(threshold=THRESHOLD, plateau=None),
    ),
    "adaptive-plain": Rule(
        label=f"AdaptiveSync({THRESHOLD}), plain PPO",
        decoupled=False,
        make=lambda _: AdaptiveSync(threshold=THRESHOLD),
    ),
    "trap": Rule(
        label=f"AdaptiveSync({THRESHOLD}) unprotected, plain PPO",
        decoupled=False,
        make=lambda _: AdaptiveSync(threshold=THRESHOLD, plateau=None, max_lag=10**6),
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train once and write what happened as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n\n")[0])
    parser.add_argument("rule", choices=list(RULES))
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--seed", type=int, required=True, help="of the agent, the environments and the learner")
    parser.add_argument("--steps", type=int, required=True, help="environment steps, rounded up to whole rollouts")
    parser.add_argument("--period", type=int, help="versions between two pulls, for the periodic rule")
    parser.add_argument("--learning-rate", type=float, default=PpoConfig.learning_rate)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    arguments = parser.parse_args(argv)
    result = train(
        arguments.rule, arguments.task, arguments.seed, arguments.steps, arguments.period, arguments.learning_rate
    )
    arguments.out.write_text(json.dumps(result))


def train(name: str, task: str, seed: int, steps: int, period: int | None, learning_rate: float) -> dict[str, Any]:
    """Train an agent; returns the run's numbers, and under "curve" those of every update."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rule = RULES[name]
    num_updates = count_updates(steps)
    curve: list[dict[str, Any]] = []
    late_returns: list[float] = []
    began = time.perf_counter()
    # Environment i gets the seed `first + i`: runs must not share environments.
    first_seed = 1000 * seed
    with ClusterEnv(task, num_envs=NUM_ENVS, num_workers=NUM_WORKERS, sync=rule.make(period)) as envs:
        agent = MlpAgent(math.prod(envs.single_observation_space.shape), int(envs.single_action_space.n))
        learner = Learner(agent, PpoConfig(decoupled=rule.decoupled, learning_rate=learning_rate), seed)
        envs.reset(seed=first_seed)
        for update in range(num_updates):
            rollout = envs.rollout(agent, NUM_STEPS)
            late_returns += pick_late(rollout, update, num_updates)
            curve.append(describe_update(rollout, update, envs.stats))
            learner.update(rollout)
        stats = envs.stats
    return {
        "updates": num_updates - 1,  # The last one is never offered to the workers.
        "pulls": stats["pulls"] / NUM_WORKERS - 1,  # Every rule starts with the same first copy.
        "late_return": float(np.mean(late_returns)) if late_returns else float("nan"),
        "late_episodes": len(late_returns),
        "bytes_weights": stats["bytes_weights"],
        "bytes_sketches": stats["bytes_sketches"],
        "seconds": time.perf_counter() - began,
        "curve": curve,
    }


def count_updates(steps: int) -> int:
    """Count the rollouts that so many environment steps take."""
    return -(-steps // (NUM_ENVS * NUM_STEPS))


def pick_late(rollout: Rollout, update: int, num_updates: int) -> list[float]:
    """Return the returns of those episodes that finished in the last tenth of the run."""
    is_late = update * NUM_STEPS + rollout.episodes.steps >= 0.9 * num_updates * NUM_STEPS
    late: list[float] = rollout.episodes.returns[is_late].tolist()
    return late


def describe_update(rollout: Rollout, update: int, stats: Mapping[str, Any]) -> dict[str, Any]:
    """List what the figure shows of one rollout."""
    returns = rollout.episodes.returns
    measured = rollout.divergences[~np.isnan(rollout.divergences)]
    return {
        "update": update,
        "env_steps": (update + 1) * NUM_STEPS * NUM_ENVS,
        "episodes": len(returns),
        "return": float(returns.mean()) if len(returns) else None,
        "age": float(rollout.ages.mean()),
        "divergence": float(measured.mean()) if len(measured) else None,
        "pulls": stats["pulls"] / NUM_WORKERS - 1,
    }


def describe_settings(task: str, learning_rate: float) -> str:
    """Put into one line what two runs must have in common to be compared."""
    config = asdict(PpoConfig(decoupled=True, learning_rate=learning_rate))
    del config["decoupled"]
    world = {"task": task, "workers": NUM_WORKERS, "envs": NUM_ENVS, "num_steps": NUM_STEPS}
    return " ".join(f"{key}={value}" for key, value in {**world, **config}.items())


if __name__ == "__main__":
    main()
