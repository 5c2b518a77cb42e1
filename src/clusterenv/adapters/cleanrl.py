"""CleanRL: a ClusterEnv with the infos of Gymnasium 0.29, which CleanRL's scripts read.

envs = CleanRLView(ClusterEnv([make_env(...) for i in range(args.num_envs)], autoreset_mode="SameStep"))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from clusterenv.adapters.infos import check_same_step, split_endings, split_infos
from clusterenv.errors import ConfigError


class CleanRLView(VectorWrapper[Any, Any, Any, Any, NDArray[Any]]):
    """Presents a vector environment as Gymnasium 0.29 did.

    When an episode ends, the step returns the next one's first observation. `infos["final_observation"]` and
    `infos["final_info"]` are then arrays of objects with the last observation and info of each episode that ended, and
    None elsewhere. Other infos are arrays of numbers, or of objects with None where an environment gave nothing. Every
    key has its `_key` mask.
    """

    def __init__(self, env: VectorEnv[Any, Any, NDArray[Any]]) -> None:
        """Wrap a ClusterEnv, or another vector environment that resets in the same step.

        Args:
            env: The vector environment, made with `autoreset_mode="SameStep"`.

        Raises:
            ConfigError: The vector environment has another autoreset mode, or was made with `copy=False`.
        """
        check_same_step(env, "CleanRLView")
        super().__init__(env)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]  # a list works, as it always has
        return obs, _gather(split_infos(infos, self.num_envs))

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        rows, endings = split_endings(infos, self.num_envs)
        for row, (final_obs, final_info) in endings.items():
            rows[row] |= {"final_observation": final_obs, "final_info": final_info}
        return obs, rewards, terminations, truncations, _gather(rows)

    def rollout(self, agent: Any, num_steps: int, **options: Any) -> Any:
        """Make a rollout as `ClusterEnv.rollout` does; rollouts have no infos to convert."""
        return self._cluster("rollout")(agent, num_steps, **options)

    def stream(self, agent: Any, num_steps: int, **options: Any) -> Any:
        """Yield rollouts as `ClusterEnv.stream` does."""
        return self._cluster("stream")(agent, num_steps, **options)

    def evaluate(self, agent: Any, episodes: int | None = None, **options: Any) -> Any:
        """Play whole episodes as `ClusterEnv.evaluate` does."""
        return self._cluster("evaluate")(agent, episodes, **options)

    @property
    def stats(self) -> dict[str, Any]:
        """What the run has done and what it has cost, as `ClusterEnv.stats` has it."""
        found: dict[str, Any] = self._cluster("stats")
        return found

    def _cluster(self, name: str) -> Any:
        """Return an attribute of the ClusterEnv, if no wrapper is in between: such a wrapper would have no effect."""
        if not hasattr(self.env, name):
            raise ConfigError(
                f"{self.env} has no {name}(): wrappers of vector environments act on step() and reset() on the head, "
                f"while rollouts are made on the workers. Call envs.unwrapped.{name}() if they may be passed over, and "
                "give ClusterEnv(wrappers=[...]) those that must take part."
            )
        return getattr(self.env, name)


def _gather(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine infos as Gymnasium 0.29 did: numbers in arrays of their type, everything else in arrays of objects."""
    infos: dict[str, Any] = {}
    for index, row in enumerate(rows):
        for key, value in row.items():
            if key not in infos:
                infos[key] = _empty(value, len(rows))
                infos[f"_{key}"] = np.zeros(len(rows), np.bool_)
            infos[key][index], infos[f"_{key}"][index] = value, True
    return infos


def _empty(value: object, num_envs: int) -> NDArray[Any]:
    # All numbers of one key have one type: they come from one array.
    if isinstance(value, bool | np.bool_ | np.number):
        return np.zeros(num_envs, type(value))
    return np.full(num_envs, None, object)
