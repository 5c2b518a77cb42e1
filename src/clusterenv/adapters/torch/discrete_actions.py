"""DiscreteActions: the actions among which a network chooses, by the environments' action space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete

from clusterenv.errors import PolicyError
from clusterenv.policy.policy import Decision


@dataclass(frozen=True)
class DiscreteActions:
    """The actions of a Discrete or MultiDiscrete space.

    Attributes:
        space: The space, as messages show it.
        sizes: The number of actions of each choice; a Discrete space has one choice.
        starts: The number of each choice's first action.
        is_multi: Whether the space is a MultiDiscrete one.
    """

    space: str
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    is_multi: bool

    @staticmethod
    def of(space: object) -> DiscreteActions | None:
        """Return the actions of a space; None if it is not one row of discrete choices."""
        if isinstance(space, Discrete):
            return DiscreteActions(str(space), (int(space.n),), (int(space.start),), is_multi=False)
        if isinstance(space, MultiDiscrete) and space.nvec.ndim == 1:
            return DiscreteActions(str(space), tuple(space.nvec.tolist()), tuple(space.start.tolist()), is_multi=True)
        return None

    @property
    def is_shifted(self) -> bool:
        """Whether the first action of any choice is not 0."""
        return any(self.starts)

    def check(self, shape: Sequence[int], source: str) -> None:
        """Check that a network returns one value per action.

        Args:
            shape: The shape of what it returned, a row per environment.
            source: What returned it.

        Raises:
            PolicyError: The shape is another one.
        """
        width = sum(self.sizes)
        if tuple(shape[1:]) == (width,):
            return
        if len(shape) == 2:
            values = "1 value" if shape[1] == 1 else f"{shape[1]} values"
            sizes = " + ".join(map(str, self.sizes))
            raise PolicyError(
                f"{source} returns {values} per row, but the action space {self.space} has {sizes} actions."
            )
        raise PolicyError(
            f"{source} returns shape {tuple(shape)}, but the action space {self.space} needs one value per action, "
            f"shape {(*shape[:1], width)}."
        )

    def shift(self, decision: Decision) -> Decision:
        """Return a decision whose actions, counted from 0, are counted as in the space."""
        if not self.is_shifted:
            return decision
        return decision._replace(action=np.asarray(decision.action) + np.array(self.starts))
