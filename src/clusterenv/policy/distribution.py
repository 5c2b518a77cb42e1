"""A policy's action distributions for a batch of observations, as plain arrays.

A distribution can be sampled (which is how most policies act), compared with another one of its family (which is what
Adaptive Policy Synchronization measures), and taken apart into arrays that can be sent. The families are in `families`.
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

    The constructor checks nothing, because a policy builds one at every step. Call `check` before comparing or sending.
    """

    family: ClassVar[str]
    sent: ClassVar[tuple[str, ...]]
    """The fields that differ between two versions of one policy: what workers send."""
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic"})
    """The per-call values that `sample` understands."""

    def __len__(self) -> int:
        return len(getattr(self, self.sent[0]))

    @abstractmethod
    def check(self) -> None:
        """Raise PolicyError unless shapes and values are valid."""

    @abstractmethod
    def kl(self, newest: Self) -> NDArray[np.float64]:
        """Return KL(self || newest) in nats for each state; both must have passed `check` and have equal shapes."""

    def total_variation(self, newest: Self) -> NDArray[np.float64]:
        """Return the share of actions that the two distributions do not have in common, for each state: from 0 to 1.

        Raises:
            PolicyError: The family has no probabilities.
        """
        raise self._has_no_probabilities()

    def second_moment(self, newest: Self) -> NDArray[np.float64]:
        """Return the mean of (newest / self)^2 over the actions of `self`, for each state: 1 if the two are equal.

        Raises:
            PolicyError: The family has no probabilities.
        """
        raise self._has_no_probabilities()

    @abstractmethod
    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw one action per state.

        Args:
            rng: The random generator to draw from.
            call: Per-call values, by the names in `reads`; other names are ignored.

        Returns:
            The actions `[n, ...]`, and their log-probabilities `[n]` if the family has them.

        Raises:
            PolicyError: The distribution holds NaN, so nothing can be drawn.
        """

    def log_prob(self, action: Array) -> Floats:
        """Return the log-probability (density, if continuous) of one given action per state, shape `[n]`.

        Raises:
            PolicyError: The family has no log-probabilities.
        """
        raise PolicyError(f"{type(self).__name__} distributions have no log-probabilities.")

    def _has_no_probabilities(self) -> PolicyError:
        return PolicyError(
            f'{type(self).__name__} distributions have no probabilities, from which measure="tv" and measure="ess" are '
            'computed. Choose measure="kl" or measure="reverse_kl".'
        )

    def to_arrays(self) -> tuple[str, dict[str, Array]]:
        """Return the family's name and the arrays named in `sent`."""
        return self.family, {name: getattr(self, name) for name in self.sent}

    def read(self, family: str, arrays: Mapping[str, Array]) -> Self:
        """Read another version's arrays as a distribution of this family on the same states.

        Family, names and shapes must be those of this distribution, which the reader made itself: a message cannot
        choose a type or a shape.

        Raises:
            PolicyError: Family, names or shapes differ, or the arrays hold NaN.
        """
        own_family, own = self.to_arrays()
        expected = {name: (array.shape, array.dtype.kind) for name, array in own.items()}
        got = {name: (array.shape, array.dtype.kind) for name, array in arrays.items()}
        if family != own_family or got != expected:
            raise PolicyError(
                f"Expected {own_family!r} distributions with shapes and kinds {expected}, got {family!r} with {got}: "
                "head and worker run different agents."
            )
        newest = self.with_arrays(arrays)
        newest.check()
        return newest

    def with_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return this distribution with other values for the fields in `sent`; they are not checked."""
        return replace(self, **arrays)  # type: ignore[type-var]  # every family is a dataclass; an ABC cannot say so


def divergence(own: Distribution, newest: Distribution) -> NDArray[np.float64]:
    """Return how far a worker's own policy is from the newest one: KL(own || newest) for each state, shape `[n]`.

    The direction is chosen because the worker's own policy made the data: the mean of this number is the mean of
    -log(newest / own) over those transitions, which PPO implementations print as `approx_kl`. It is per state rather
    than summed over environments, so that a threshold means the same for 1 and for 1,000 of them. It is infinite where
    the newest policy never does what the worker's may do, never negative and never NaN.

    Raises:
        PolicyError: The two distributions are of different families or sizes, or hold NaN.
    """
    own.check()
    gap = own.kl(own.read(*newest.to_arrays()))
    if np.isnan(gap).any():
        raise PolicyError(f"The divergence of two {own.family} distributions is NaN.")
    return gap


def check_floats(owner: str, array: Floats, shape: tuple[int | None, ...], *, may_forbid: bool = False) -> None:
    """Raise PolicyError, calling the array `owner`, unless it holds finite floats of `shape` (None: any size from 1).

    With `may_forbid`, -inf marks an action as forbidden; each row must keep at least one action.
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
            raise PolicyError(f"{owner} has a row without any finite number, so no action is possible there.")
        finite |= np.isneginf(array)
    if not finite.all():
        raise PolicyError(f"{owner} holds NaN or inf. Has training diverged?")


def read_number(call: Call, name: str, default: float, num_rows: int) -> Floats:
    """Read a per-call value as a number, or an array of one number per environment.

    Raises:
        PolicyError: The value is not numeric, or is an array of another shape.
    """
    value = np.asarray(call.get(name, default))
    if value.dtype.kind not in "fiub":
        raise PolicyError(f"The per-call value {name}={call[name]!r} should be a number.")
    if value.shape not in ((), (1,), (num_rows,)):
        raise PolicyError(
            f"The per-call value {name} should be a number, or an array with one number for each of the worker's "
            f"{num_rows} environments; got an array of shape {value.shape}."
        )
    return value.astype(np.float32)


def read_epsilon(call: Call, num_rows: int) -> Floats:
    """Read the per-call value "epsilon".

    Raises:
        PolicyError: The value is not a probability.
    """
    value = read_number(call, "epsilon", 0.0, num_rows)
    if not ((value >= 0) & (value <= 1)).all():
        raise PolicyError(f'values={{"epsilon": {call["epsilon"]!r}}} must be from 0 to 1: it is a probability.')
    return value


def read_temperature(call: Call, num_rows: int) -> Floats:
    """Read the per-call value "temperature".

    Raises:
        PolicyError: The value is not a positive number.
    """
    value = read_number(call, "temperature", 1.0, num_rows)
    if not (value > 0).all():
        raise PolicyError(
            f'values={{"temperature": {call["temperature"]!r}}} must be positive. For the likeliest actions, pass '
            'values={"deterministic": True}.'
        )
    return value


def is_deterministic(call: Call) -> bool:
    """Return whether this call asks for each state's most likely action."""
    return bool(call.get("deterministic", False))


def refuse_nan(value: Floats) -> None:
    """Raise PolicyError if any number is NaN: sampling would silently return action 0."""
    if np.isnan(value).any():
        raise PolicyError(
            "The policy's action distribution holds NaN. Has training diverged, or does an observation hold NaN?"
        )
