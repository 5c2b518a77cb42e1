"""Sketches: a policy's action distributions on a few probe observations.

The probes are a sample of a worker's own last rollout. Head and worker both have that rollout and draw the same
sample, so only the distributions are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array
from clusterenv.policy.policy import Policy, State, Tree, map_tree

DEFAULT_PROBES = 64


class ProbeIndices(NamedTuple):
    """Which rows of a rollout are probes: `rollout[steps[k], envs[k]]`."""

    steps: NDArray[np.int64]
    envs: NDArray[np.int64]


class Probes(NamedTuple):
    """Observations (and recurrent states, if any) on which policies are compared; each `[K, ...]`."""

    obs: Tree
    state: State | None = None


@dataclass(frozen=True, eq=False)
class Sketch:
    """A version's action distributions on probes, as arrays that can be sent."""

    version: int
    family: str
    arrays: dict[str, Array]

    @property
    def size_bytes(self) -> int:
        """The size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class Measurement(NamedTuple):
    """The estimated mean divergence per state, and the standard error of that estimate, in nats."""

    mean: float
    standard_error: float


def choose_probes(
    num_steps: int,
    num_envs: int,
    *,
    count: int = DEFAULT_PROBES,
    seed: int,
    number: int,
    valid: NDArray[np.bool_] | None = None,
) -> ProbeIndices:
    """Choose `count` rows of a rollout, or all if it has fewer, spread evenly over its time and its environments.

    Each probe comes from its own stretch of time, and environments take turns in a random order: neighbouring states
    of one episode are so alike that choosing both would waste a probe. Equal arguments give equal rows on every
    machine and numpy version.

    Args:
        num_steps: T of the rollout.
        num_envs: Environments of this worker.
        count: How many probes.
        seed: Agreed on once by head and worker.
        number: The rollout's number, so that each rollout has its own probes.
        valid: Shape `[T, n]`, False where no action was taken (a reset row); such a row is replaced by the next valid
            one of its environment.
    """
    count = min(count, num_steps * num_envs)
    rounds = -(-count // num_envs)
    # SeedSequence guarantees the same numbers in every version; np.random.Generator does not.
    bits = np.random.SeedSequence((seed, number)).generate_state(count + rounds * num_envs, np.uint32).astype(np.int64)
    jitter, turns = bits[:count], bits[count:].reshape(rounds, num_envs)
    steps = (np.arange(count) * 2**32 + jitter) * num_steps // (count * 2**32)
    envs = turns.argsort(axis=1, kind="stable").reshape(-1)[:count]
    if valid is not None:
        steps = _next_valid(steps, envs, valid)
    return ProbeIndices(steps, envs)


def take_probes(indices: ProbeIndices, obs: Tree, states: State | None = None) -> Probes:
    """Copy the probes out of a rollout's observations (and recurrent states, if any), each `[T, n, ...]`."""
    obs = map_tree(lambda array: array[indices], obs)
    return Probes(obs, None if states is None else {name: array[indices] for name, array in states.items()})


def make_sketch(policy: Policy, probes: Probes, version: int) -> Sketch | None:
    """Sketch a policy on probes; None if the policy cannot say how its actions are distributed.

    Raises:
        PolicyError: The distribution is invalid, most likely because training has diverged to NaN.
    """
    distribution = policy.distribution(probes.obs, probes.state)
    if distribution is None:
        return None
    distribution.check()
    family, arrays = distribution.to_arrays()
    return Sketch(version, family, {name: np.ascontiguousarray(array) for name, array in arrays.items()})


def measure(policy: Policy, probes: Probes, sketch: Sketch) -> Measurement:
    """Estimate the mean of KL(policy || sketched policy) over the states the probes were drawn from.

    Raises:
        PolicyError: The sketch does not fit the policy's own distributions.
    """
    own = policy.distribution(probes.obs, probes.state)
    if own is None:
        raise PolicyError("This policy has no distribution() to compare a sketch with.")
    own.check()
    gap = own.kl(own.read(sketch.family, sketch.arrays))
    if not np.isfinite(gap).all():
        return Measurement(math.inf, math.inf)
    spread = float(gap.std(ddof=1)) if len(gap) > 1 else math.inf
    return Measurement(float(gap.mean()), spread / math.sqrt(len(gap)))


def _next_valid(steps: NDArray[np.int64], envs: NDArray[np.int64], valid: NDArray[np.bool_]) -> NDArray[np.int64]:
    moved = steps.copy()
    for k in np.flatnonzero(~valid[steps, envs]).tolist():
        if (candidates := np.flatnonzero(valid[:, envs[k]])).size:
            later = candidates[candidates > steps[k]]
            moved[k] = later[0] if later.size else candidates[-1]
    return moved
