"""Sample: the spaces and attributes of a run's environments, from the workers' descriptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import Space
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from clusterenv.errors import ConfigError
from clusterenv.wire.assignment import RunSpaces

ObservationMode = str | tuple[Space[Any], Space[Any]]
Description = dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Sample:
    """Spaces and attributes of the environments."""

    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    must_equal: bool

    @property
    def run_spaces(self) -> RunSpaces:
        """The spaces that every worker's environments must have."""
        return RunSpaces(
            observation_space=self.single_observation_space,
            action_space=self.single_action_space,
            must_equal=self.must_equal,
        )


def check_mode(observation_mode: ObservationMode) -> None:
    """Check the observation mode.

    Raises:
        ValueError: The mode is not one of Gymnasium's.
        TypeError: The mode is a tuple of something other than spaces.
    """
    if isinstance(observation_mode, tuple) and len(observation_mode) == 2:
        if not all(isinstance(space, Space) for space in observation_mode):
            raise TypeError(
                "Expected both elements of observation_mode to be Spaces, "
                f"got {type(observation_mode[0])} and {type(observation_mode[1])}"
            )
    elif observation_mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {observation_mode}"
        )


def make_sample(
    descriptions: Sequence[tuple[int, Description]],
    observation_mode: ObservationMode,
    num_envs: int,
    ask_here: Callable[[], Description],
) -> Sample:
    """Make a sample from the workers' descriptions of their environments.

    Args:
        descriptions: For each shard, its number of environments and their description (`worker.making.describe_envs`).
        observation_mode: As in Gymnasium.
        num_envs: The number of environments in the whole run.
        ask_here: Makes and describes an environment on this machine, for spaces that cannot be sent.
    """
    first = _checked(descriptions[0][1])
    spaces, action = first["observation_spaces"], first["action_space"]
    if None in spaces or action is None:
        here = ask_here()
        spaces, action = here["observation_spaces"], here["action_space"]
    single = spaces[0]
    if isinstance(observation_mode, tuple):
        observation, single = observation_mode
    elif observation_mode == "same":
        observation = batch_space(single, num_envs)
    else:
        every: list[Any] = []
        for size, description in descriptions:
            own = _checked(description)["observation_spaces"]
            every += own * size if len(own) == 1 else own
        if None in every or len(every) != num_envs:
            raise ConfigError(
                "observation_mode='different' needs spaces of Gymnasium's own types, which workers can send; "
                f"one of these environments has {type(single).__name__}. Pass observation_mode=(batched, single), or "
                "num_workers=0."
            )
        observation = batch_differing_spaces(every)
    return Sample(
        single_observation_space=single,
        observation_space=observation,
        single_action_space=action,
        action_space=batch_space(action, num_envs),
        metadata=first["metadata"],
        render_mode=first["render_mode"],
        must_equal=observation_mode == "same",
    )


def _checked(description: Description) -> Description:
    """Check a worker's description."""
    spaces = description.get("observation_spaces")
    render_mode = description.get("render_mode")
    if (
        not isinstance(spaces, list)
        or not spaces
        or not all(space is None or isinstance(space, Space) for space in spaces)
        or not isinstance(description.get("action_space"), Space | None)
        or not isinstance(description.get("metadata"), dict)
        or not isinstance(render_mode, str | None)
    ):
        raise ConfigError("A worker has sent a malformed description of its environments.")
    return description
