"""How far a worker's policy is from the learner's newest one.

The divergence is KL(own || newest) in each state, in nats, averaged over states the worker has itself visited. This
direction, because the worker's own policy is the one that made the data: it is the mean of -log(newest / own) over
those transitions, so it bounds the importance weights a learner needs, and it is the quantity PPO implementations
print as `approx_kl`. Per state and not summed over environments, so a threshold means the same for 1 and for 1,000 of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution, Floats

Parameters: TypeAlias = Mapping[str, Array]


def divergence(own: Distribution, newest: Distribution) -> NDArray[np.float64]:
    """Return KL(own || newest) for each state, shape `[n]`.

    Infinite where the newest policy never does what the worker's may do; never negative, never NaN.

    Raises:
        PolicyError: The two are of different families or sizes, or hold NaN.
    """
    own.check()
    gap = own.kl(own.read(*newest.to_arrays()))
    if np.isnan(gap).any():
        raise PolicyError(f"The divergence of two {own.family} distributions is NaN.")
    return gap


@dataclass(frozen=True, eq=False)
class Custom(Distribution):
    """A distribution only its user understands: named arrays, and a function that compares two sets of them.

    Only the arrays travel; the function is the reader's own.

    Attributes:
        arrays: Whatever describes the policy on n states; the first axis of the first array counts them.
        compare: `compare(own arrays, newest arrays)` returns one non-negative number per state, shape `[n]`.
        name: Tells different custom families apart.
    """

    arrays: Parameters
    compare: Callable[[Parameters, Parameters], Floats]
    name: str = "custom"

    family: ClassVar[str] = "custom"

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values()), ()))

    def check(self) -> None:
        """Want at least one array with at least one row."""
        if len(self) == 0:
            raise PolicyError(f"The custom distribution {self.name!r} holds no arrays, or no states.")

    def kl(self, newest: Custom) -> NDArray[np.float64]:
        """Ask the user's function, and check what it says."""
        gap = np.asarray(self.compare(self.arrays, newest.arrays), np.float64)
        if gap.shape != (len(self),) or (gap < 0).any():
            raise PolicyError(
                f"Custom.compare of {self.name!r} should return one non-negative number for each of {len(self)} "
                f"states, got shape {gap.shape}, smallest {gap.min(initial=np.inf):g}."
            )
        return gap

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Refuse."""
        raise PolicyError(f"The custom distribution {self.name!r} cannot be sampled: write the policy's act().")

    def log_prob(self, action: Array) -> Floats:
        """Refuse."""
        raise PolicyError(f"The custom distribution {self.name!r} has no log-probabilities.")

    def to_arrays(self) -> tuple[str, dict[str, Array]]:
        """Return the name and the arrays."""
        return self.name, dict(self.arrays)

    def read(self, family: str, arrays: Parameters) -> Custom:
        """Read arrays of exactly the names, shapes and kinds of this one."""
        expected = {name: (array.shape, array.dtype.kind) for name, array in self.arrays.items()}
        got = {name: (array.shape, array.dtype.kind) for name, array in arrays.items()}
        if family != self.name or got != expected:
            raise PolicyError(f"Expected a sketch {self.name!r} with {expected}, got {family!r} with {got}.")
        return Custom(arrays, self.compare, self.name)
