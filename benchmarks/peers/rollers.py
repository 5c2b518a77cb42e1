"""The contenders of the rollout benchmark: how each is built, inside its own process and interpreter."""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.peers.bare import PairLockstep
from benchmarks.peers.roller import NUM_STEPS, Roller
from benchmarks.peers.rollers_central import (
    build_central_async,
    build_central_clusterenv,
    build_central_envpool,
    build_central_puffer,
    build_central_sb3,
    build_central_sync,
)
from benchmarks.peers.rollers_clusterenv import build_envpool_rollout, build_rollout, build_stream
from benchmarks.peers.rollers_rllib import build_rllib
from benchmarks.peers.rollers_torchrl import build_torchrl


class BareRollouts:
    """Two bare loops with an agent in each, which meet once per rollout."""

    def __init__(self, task: str, num_envs: int) -> None:
        from benchmarks.peers.bare_rollout import AgentShard

        self._pair = PairLockstep(task, num_envs, partial(AgentShard, num_steps=NUM_STEPS))

    def run(self, seconds: float) -> float:
        """Collect whole rollouts for at least so long; returns environment steps per second."""
        return self._pair.run(seconds) * NUM_STEPS

    def close(self) -> None:
        """End both processes."""
        self._pair.close()


def build_json_push(task: str, num_envs: int) -> Roller:
    """Build two workers that get all weights as JSON for every step."""
    from benchmarks.peers.json_push import JsonPush

    push = JsonPush(task, num_envs, NUM_STEPS)
    return Roller(push.step, push.close)


ROLLERS: Mapping[str, Callable[..., Roller | BareRollouts]] = {
    "bare-rollout": BareRollouts,
    "clusterenv-rollout": build_rollout,
    "clusterenv-stream": build_stream,
    "clusterenv-envpool-rollout": build_envpool_rollout,
    "central-clusterenv": build_central_clusterenv,
    "central-sync": build_central_sync,
    "central-async": build_central_async,
    "central-sb3": build_central_sb3,
    "central-puffer": build_central_puffer,
    "central-envpool": build_central_envpool,
    "torchrl": build_torchrl,
    "rllib": build_rllib,
    "json-push": build_json_push,
}
