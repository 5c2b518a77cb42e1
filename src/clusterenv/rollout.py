"""Rollout: T steps of N environments, with the policy versions that chose the actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

# The fields of a rollout that are learned from.
_LEARNED = ("obs", "actions", "rewards", "terminations", "truncations", "valid", "extras", "next_obs", "states")


class Transitions(NamedTuple):
    """Single transitions for a replay buffer, each array `[M, ...]`, in order of time, then environment.

    `next_obs` is the observation the action really led to, even where an episode ended.
    """

    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    next_obs: Any
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Episodes:
    """The episodes that finished during a rollout, one entry each.

    Attributes:
        returns: Each episode's sum of rewards, including those from earlier rollouts.
        lengths: Each episode's number of steps, counted likewise.
        env_indices: The environment of each episode.
        steps: The step of this rollout at which each episode ended.
        infos: The info of each episode's last step.
        columns: The rollout's column of each episode: a stream may deliver two rollouts of an environment side by side.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    env_indices: NDArray[np.int64]
    steps: NDArray[np.int64]
    infos: list[dict[str, Any]]
    columns: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.returns)


@dataclass(frozen=True, eq=False)
class Finals:
    """The final observations of finished episodes: what their last actions led to.

    Attributes:
        obs: `[F, ...]`, nested like the observation space.
        steps: The step of the rollout at which each episode ended.
        columns: The column of the rollout in which each episode ended.
    """

    obs: Any
    steps: NDArray[np.int64]
    columns: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Positions:
    """Where each environment stood when a rollout began, each `[N]`; lets episodes be pieced together across rollouts.

    Attributes:
        lives: A number unique to each process that has run the environment: a replacement begins new episodes.
        episodes: The number of the episode the environment was in.
        steps: How many steps of that episode it had taken; -1 if the episode's beginning was not seen.
        seeds: The seed that episode was reset with; -1 if there was none, or it is unknown.
        run: A number unique to each ClusterEnv.
    """

    lives: NDArray[np.int64]
    episodes: NDArray[np.int64]
    steps: NDArray[np.int64]
    seeds: NDArray[np.int64]
    run: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rollout:
    """T steps of N environments, as arrays `[T, N, ...]`.

    Column i is environment i; if the rollout covers only some environments, as in streams, it is `env_indices[i]`.

    Attributes:
        obs: The observations on which the actions were chosen, nested like the observation space.
        actions: Nested like the action space.
        extras: What the policy returned besides actions, by name: "logprob", "value", ...
        next_obs: `[N, ...]`, the observations after the last step, to bootstrap from.
        valid: False where no action was taken, so that the row is not a transition: in NEXT_STEP mode the step that
            resets an environment; without autoreset all steps after an episode's end. Leave such rows out of the loss.
        states: The policy's recurrent state before each step, by name; empty if it has none.
        finals: The final observations of finished episodes.
        episodes: The finished episodes' returns and lengths.
        positions: Where the environments stood before the first step.
        env_indices: `[N]`, the environment of each column.
        versions: `[N]`, the version of the weights that chose environment i's actions.
        ages: `[N]`, how many versions behind the newest that was.
        divergences: `[N]`, the mean KL divergence of that version from the newest, on delivery; NaN if not compared.
        stats: What this rollout cost: seconds, pulls, bytes by kind, the workers' idle share.
    """

    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    extras: dict[str, NDArray[Any]]
    next_obs: Any
    states: dict[str, NDArray[Any]]
    finals: Finals
    episodes: Episodes
    positions: Positions
    env_indices: NDArray[np.int64]
    versions: NDArray[np.int64]
    ages: NDArray[np.int64]
    divergences: NDArray[np.float64]
    autoreset_mode: AutoresetMode
    stats: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Say what it is, without printing its arrays."""
        return f"Rollout(num_steps={self.num_steps}, num_envs={self.num_envs}, extras={list(self.extras)})"

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.rewards)

    @property
    def num_envs(self) -> int:
        """N."""
        return len(self.versions)

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Return an extra by its name: `rollout.logprob`."""
        extras = self.__dict__.get("extras", {})
        if name in extras:
            found: NDArray[Any] = extras[name]
            return found
        raise AttributeError(f"A Rollout has no {name!r}; the policy's extras are: {', '.join(extras) or 'none'}.")

    def to_torch(self, device: Any = None) -> Rollout:
        """Return the same rollout with tensors in place of arrays; on the CPU they share its memory.

        `episodes`, `finals`, `positions`, `env_indices`, `versions`, `ages` and `divergences` stay as they are: they
        say where the data comes from, and are not learned from.

        Args:
            device: The device of the tensors; by default the CPU.
        """
        import torch  # Optional dependency.

        def convert(array: Any) -> Any:
            is_array = isinstance(array, np.ndarray)
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy()) if is_array else array
            return tensor if device is None else tensor.to(device, non_blocking=True)

        changed = {name: map_tree(convert, getattr(self, name)) for name in _LEARNED}
        return replace(self, **changed)

    def to_tensordict(self, device: Any = None) -> Any:
        """Return a `TensorDict` of batch size `[T, N]`, laid out like those of TorchRL's collectors.

        Its keys are "observation", "action", "valid", the extras and recurrent states by their names, and under "next"
        the "observation" each action really led to, "reward", "terminated", "truncated" and "done". On the CPU all but
        the next observations share the rollout's memory.
        """
        try:
            from tensordict import TensorDict  # Optional dependency.
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("to_tensordict() needs the package tensordict: pip install tensordict") from error

        own = self.to_torch(device)
        following = replace(self, obs=self._next_observations()).to_torch(device).obs

        def column(tensor: Any) -> Any:
            return tensor[..., None]

        ends = {"terminated": column(own.terminations), "truncated": column(own.truncations)}
        done = column(own.terminations | own.truncations)
        following = {"observation": following, "reward": column(own.rewards), **ends, "done": done}
        named = {"observation": own.obs, "action": own.actions, "valid": own.valid, **own.extras, **own.states}
        return TensorDict(_name_all({**named, "next": following}), batch_size=[self.num_steps, self.num_envs])

    def _next_observations(self) -> Any:
        """Return the observation that each action really led to, `[T, N, ...]`."""

        def follow(obs: NDArray[Any], last: NDArray[Any], final: NDArray[Any]) -> NDArray[Any]:
            following = np.concatenate([obs[1:], last[None]])
            if self.autoreset_mode is AutoresetMode.SAME_STEP:  # Otherwise the next row is the final observation.
                following[self.finals.steps, self.finals.columns] = final
            return following

        return map_tree(follow, self.obs, self.next_obs, self.finals.obs)

    def transitions(self) -> Transitions:
        """Return the valid steps as single transitions, with true final observations.

        Raises:
            TypeError: The rollout holds tensors.
        """
        if not isinstance(self.valid, np.ndarray):
            raise TypeError("This rollout holds tensors: take transitions() of the one with arrays, before to_torch().")
        steps, envs = np.nonzero(self.valid)
        return Transitions(
            map_tree(lambda part: part[steps, envs], self.obs),
            map_tree(lambda part: part[steps, envs], self.actions),
            self.rewards[steps, envs],
            map_tree(lambda part: part[steps, envs], self._next_observations()),
            self.terminations[steps, envs],
            self.truncations[steps, envs],
        )


def _name_all(tree: Any) -> Any:
    """Turn tuples, which a TensorDict cannot hold, into dicts."""
    if isinstance(tree, tuple):
        tree = {str(index): part for index, part in enumerate(tree)}
    return {name: _name_all(part) for name, part in tree.items()} if isinstance(tree, dict) else tree


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the corresponding arrays of trees that are nested alike."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: map_tree(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        return tuple(map_tree(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)
