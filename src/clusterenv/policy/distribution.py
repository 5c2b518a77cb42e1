"""A policy's action distributions on a batch of observations, as plain arrays.

A distribution can be sampled (that is how most policies act), compared with another of its family (that is what
Adaptive Policy Synchronization measures) and taken apart into arrays that travel. The families are in `discrete` and
`continuous`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError

Array: TypeAlias = NDArray[Any]  # Gymnasium spaces allow every dtype.
Floats: TypeAlias = NDArray[np.floating]
CallValue: TypeAlias = float | int | bool | str | Array
Call: TypeAlias = Mapping[str, CallValue]

NO_VALUES: Call = MappingProxyType({})


class Distribution(ABC):
    """What a policy may do in each of n states.

    Building one is free of checks, because a policy builds one at every step; `check` is for the rare moments when it
    crosses a border.
    """

    family: ClassVar[str]
    sent: ClassVar[tuple[str, ...]]
    """The fields that differ between two versions of one policy: what a sketch holds."""
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic"})
    """The per-call values that `sample` understands."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the states."""

    @abstractmethod
    def check(self) -> None:
        """Raise PolicyError unless shapes and values make sense."""

    @abstractmethod
    def kl(self, newest: Self) -> NDArray[np.float64]:
        """Return KL(self || newest) in nats for each state; both must have passed `check` and have equal shapes."""

    @abstractmethod
    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw one action per state.

        Args:
            rng: Where the randomness comes from.
            call: Per-call values, by the names in `reads`; other names are ignored.

        Returns:
            The actions `[n, ...]`, and their log-probabilities `[n]` if the family has them.

        Raises:
            PolicyError: The distribution holds NaN, so nothing can be drawn.
        """

    @abstractmethod
    def log_prob(self, action: Array) -> Floats:
        """Return the log-probability (density, if continuous) of one given action per state, shape `[n]`."""

    def to_arrays(self) -> tuple[str, dict[str, Array]]:
        """Take apart into the family's name and the arrays of `sent`."""
        return self.family, {name: getattr(self, name) for name in self.sent}

    def read(self, family: str, arrays: Mapping[str, Array]) -> Self:
        """Read another version's arrays as a distribution of this family on the same states.

        This distribution, which the reader made itself, says what may come: nothing in the message chooses a type or a
        shape.

        Raises:
            PolicyError: Another family, other names, other shapes or dtypes, NaN.
        """
        if family != self.family:
            raise PolicyError(
                f"Expected a sketch of family {self.family!r}, got {family!r}: head and worker run different agents."
            )
        own = self.to_arrays()[1]
        if arrays.keys() != own.keys():
            raise PolicyError(f"A {family} sketch holds {sorted(own)}, got {sorted(arrays)}.")
        for name, array in arrays.items():
            if array.dtype.kind != "f" or array.shape != own[name].shape:
                raise PolicyError(
                    f"{name!r} of a {family} sketch should be floats of shape {own[name].shape}, "
                    f"got {array.dtype} of shape {array.shape}."
                )
        newest = replace(self, **arrays)  # type: ignore[type-var]  # every family is a dataclass; an ABC cannot say so
        newest.check()
        return newest


def check_floats(owner: str, array: Floats, shape: tuple[int | None, ...], *, may_forbid: bool = False) -> None:
    """Raise PolicyError unless `array` holds finite floats of `shape` (None: any size from 1).

    Args:
        owner: How the error calls the array.
        array: What is checked.
        shape: The expected shape.
        may_forbid: Whether -inf is allowed, which marks an action as forbidden; some action must remain in each row.
    """
    fits = array.ndim == len(shape) and all(
        size == expected if expected is not None else size >= 1
        for size, expected in zip(array.shape, shape, strict=True)
    )
    if array.dtype.kind != "f" or not fits:
        wanted = tuple("any" if size is None else size for size in shape)
        raise PolicyError(f"{owner} should be floats of shape {wanted}, got {array.dtype} of shape {array.shape}.")
    finite = np.isfinite(array)
    if may_forbid:
        if not finite.any(axis=-1).all():
            raise PolicyError(f"{owner} has a row without any finite number: no action is possible there.")
        finite |= np.isneginf(array)
    if not finite.all():
        raise PolicyError(f"{owner} holds NaN or inf. Has training diverged?")


def read_number(call: Call, name: str, default: float) -> Floats:
    """Read a per-call value as a number, or an array of one number per environment.

    Raises:
        PolicyError: It is not numeric.
    """
    value = np.asarray(call.get(name, default))
    if value.dtype.kind not in "fiub":
        raise PolicyError(f"The per-call value {name}={call[name]!r} should be a number.")
    return value.astype(np.float32)


def is_deterministic(call: Call) -> bool:
    """Say whether this call wants each state's most likely action."""
    return bool(call.get("deterministic", False))


def refuse_nan(value: Floats) -> None:
    """Raise PolicyError if any number is NaN: drawing from such a distribution would silently return action 0."""
    if np.isnan(value).any():
        raise PolicyError(
            "The policy's action distribution holds NaN. Has training diverged, or does an observation hold NaN?"
        )
