"""RLlib's EnvRunners as a contender: two of them in processes of their own, each with half of the environments.

Only sampling is measured, no learner runs. The module is PPO's own with the same two hidden layers for policy and
critic; while sampling RLlib evaluates the policy only, and leaves the critic to the learner.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.peers.roller import NUM_STEPS, Roller
from benchmarks.tasks import TASKS

NUM_RUNNERS = 2
TIMEOUT_S = 50.0
PATIENCE_S = 0.02


def build_rllib(task: str, num_envs: int, *, in_flight: int, num_steps: int = NUM_STEPS) -> Roller:
    """Build RLlib's EnvRunners.

    Args:
        task: A key of `tasks.TASKS`.
        num_envs: Of both runners together.
        in_flight: How many samples each runner may have been asked for: 0 to ask both and wait for both, as PPO does;
            more to take whatever is ready, as IMPALA does.
        num_steps: How many steps of each environment a sample has.
    """
    # It would ask a server on the Internet whether to report its usage; and its token is of no use on one machine.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    directory = tempfile.mkdtemp(prefix="rllib-")
    ray.init(
        num_cpus=NUM_RUNNERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=directory,
    )
    config = (
        PPOConfig()
        .environment(TASKS[task])
        .env_runners(
            num_env_runners=NUM_RUNNERS,
            num_envs_per_env_runner=num_envs // NUM_RUNNERS,
            rollout_fragment_length=num_steps,
            max_requests_in_flight_per_env_runner=max(1, in_flight),
        )
        .training(train_batch_size=num_envs * num_steps)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64, 64],
                fcnet_activation="tanh",
                head_fcnet_hiddens=[],
                vf_share_layers=False,
            )
        )
    )
    algorithm = config.build_algo()
    runners = algorithm.env_runner_group

    def close() -> None:
        algorithm.stop()
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)

    return Roller(sample_together(runners) if in_flight == 0 else sample_as_ready(runners, in_flight), close)


def sample_together(runners: Any) -> Callable[[], int]:
    """Ask all runners for a sample and wait for all."""

    def collect() -> int:
        samples = runners.foreach_env_runner("sample", local_env_runner=False, timeout_seconds=TIMEOUT_S)
        return count_env_steps(samples)

    return collect


def sample_as_ready(runners: Any, in_flight: int) -> Callable[[], int]:
    """Keep all runners busy and take what is ready."""

    def collect() -> int:
        for _ in range(in_flight):
            runners.foreach_env_runner_async("sample", tag="sample")
        ready: list[Any] = []
        while not ready:
            # It waits for all of them, or for so long, and then returns those that are ready.
            ready = runners.fetch_ready_async_reqs(tags="sample", timeout_seconds=PATIENCE_S)
        return count_env_steps([episodes for _, episodes in ready])

    return collect


def count_env_steps(samples: list[Any]) -> int:
    """Count the steps in episodes, in which resets are none."""
    return sum(len(episode) for episodes in samples for episode in episodes)
