"""Probes: the rows of a rollout for which a worker reports its policy's action distributions.

With each rollout, a worker sends the parameters of its distributions at a few rows. The head has the observations of
these rows: evaluating the newest policy on them shows how far the worker's has diverged, without another message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import ClusterEnvError, PolicyError, WireError
from clusterenv.policy.distribution import Array, Distribution
from clusterenv.policy.policy import Policy, State, Tree, map_tree


class Probes(NamedTuple):
    """Parameters of a policy's action distributions at some rows of a rollout.

    Attributes:
        rows: The rows' numbers: step times the number of environments, plus the environment; ascending.
        family: The family of the distributions.
        arrays: Their parameters: those that differ from state to state have one row for each of `rows`.
        states: The recurrent state before each row, if the receiver does not have it.
    """

    rows: NDArray[np.uint32]
    family: str
    arrays: dict[str, Array]
    states: dict[str, Array]


@dataclass(frozen=True)
class Form:
    """What a policy's distributions look like, on any number of states.

    Attributes:
        model: A distribution on two states.
        family: Its family.
        per_state: The parameters that have a row for each state; the others hold for all states.
    """

    model: Distribution
    family: str
    per_state: frozenset[str]

    @classmethod
    def of(cls, policy: Policy, obs: Tree, state: State | None) -> Self | None:
        """Find the form by evaluating a policy on one state and on two; None if it has no distributions.

        Args:
            policy: Any policy.
            obs: One or more observations.
            state: A recurrent state for each observation, if the policy has any.

        Raises:
            PolicyError: The policy cannot be evaluated.
        """
        one, two = (
            distribution_of(policy, *take((obs, state), np.zeros(count, np.int64)))  # The first state, once and twice.
            for count in (1, 2)
        )
        if one is None or two is None:
            return None
        family, few = one.to_arrays()
        more = two.to_arrays()[1]
        return cls(two, family, frozenset(name for name in more if more[name].shape != few[name].shape))

    @property
    def row_bytes(self) -> int:
        """The number of bytes a worker sends per row: the parameters and the row's number."""
        return 4 + sum(array[:1].nbytes for name, array in self.model.to_arrays()[1].items() if name in self.per_state)

    def pick(self, arrays: Mapping[str, Array], rows: NDArray[np.integer]) -> dict[str, Array]:
        """Return the parameters on some of the states."""
        return {name: array[rows] if name in self.per_state else array for name, array in arrays.items()}

    def join(self, parts: list[dict[str, Array]]) -> dict[str, Array]:
        """Concatenate parameters on different states; those that hold for all states are taken from the first part."""
        return {
            name: np.concatenate([part[name] for part in parts]) if name in self.per_state else array
            for name, array in parts[0].items()
        }

    def check(self, family: str, arrays: Mapping[str, Array], count: int) -> None:
        """Check that received arrays are the parameters of such distributions on `count` states.

        Raises:
            PolicyError: They are not.
        """
        expected = {
            name: ((count, *array.shape[1:]) if name in self.per_state else array.shape, array.dtype.kind)
            for name, array in self.model.to_arrays()[1].items()
        }
        got = {name: (array.shape, array.dtype.kind) for name, array in arrays.items()}
        if family != self.family or got != expected:
            raise PolicyError(
                f"Expected the parameters of {self.family!r} distributions with shapes and kinds {expected}, got "
                f"{family[:100]!r} with {str(got)[:300]}."
            )
        self.model.with_arrays(arrays).check()


def distribution_of(policy: Policy, obs: Tree, state: State | None) -> Distribution | None:
    """Evaluate the learner's policy; None if it has no distributions.

    Raises:
        PolicyError: The policy raised, most likely because training has diverged.
    """
    try:
        return policy.distribution(obs, state)
    except ClusterEnvError:
        raise
    except Exception as error:
        raise PolicyError(
            f"The policy raised {type(error).__name__}: {error}. It was being evaluated beside the learner, on "
            "observations of the workers, to judge which of them take its newest version. Has training diverged?"
        ) from error


def take(probed: tuple[Tree, State | None], rows: Any) -> tuple[Tree, State | None]:
    """Copy some rows of observations and recurrent states."""
    obs, state = probed
    chosen = map_tree(lambda array: array[rows], obs)
    return chosen, None if state is None else {name: array[rows] for name, array in state.items()}


def spread(count: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose `count` of `size` indices, or all if there are fewer: one at random from each of `count` stretches."""
    if count >= size:
        return np.arange(size)
    # Rounding keeps the choices distinct: stretches of length 1 or more do not share an index.
    edges = np.arange(count + 1) * size // count
    chosen: NDArray[np.int64] = edges[:-1] + (rng.random(count) * np.diff(edges)).astype(np.int64)
    return chosen


def pack(probes: Probes) -> dict[str, Any]:
    """Return probes as plain data."""
    return probes._asdict()


def unpack(data: Any, form: Form, *, num_rows: int, at_most: int, states: Mapping[str, Array]) -> Probes:
    """Read the probes that a worker has sent.

    Args:
        data: What the worker sent, as plain data.
        form: The form the distributions must have.
        num_rows: The number of rows of the rollout.
        at_most: How many probes the worker was asked for.
        states: The recurrent states that must come with the probes, of any number of rows.

    Raises:
        WireError: The data is malformed, or not the parameters of valid distributions.
    """
    try:
        probes = Probes(**data)
        rows = probes.rows
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint32 or rows.ndim != 1 or len(rows) > at_most:
            raise ValueError(f"not at most {at_most} rows")
        if len(rows) == 0 or rows.max() >= num_rows or (rows[1:] <= rows[:-1]).any():
            raise ValueError(f"not ascending rows below {num_rows}")
        if not isinstance(probes.family, str) or not all(type(array) is np.ndarray for array in probes.arrays.values()):
            raise TypeError("no arrays of a family")
        expected = {name: ((len(rows), *array.shape[1:]), array.dtype.kind) for name, array in states.items()}
        got = {name: (array.shape, array.dtype.kind) for name, array in probes.states.items()}
        if got != expected:
            raise ValueError(f"states {str(got)[:300]} instead of {expected}")
        form.check(probes.family, probes.arrays, len(rows))
    except (TypeError, ValueError, AttributeError, KeyError, PolicyError) as error:
        raise WireError(f"What it says of its policy is malformed: {str(error)[:600]}") from error
    return probes
