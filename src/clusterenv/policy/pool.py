"""Pool: how one version of a policy acted in states that it met, collected from all workers that hold it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from clusterenv.policy.distribution import Array
from clusterenv.policy.measure import Measure, measure_divergence
from clusterenv.policy.policy import Policy, State, Tree
from clusterenv.policy.probes import Form, distribution_of

Nest = Callable[[Sequence[Array]], Tree]

POOL_ROWS = 512  # At a threshold of 0.05 their mean is within 5 % of the truth; see docs/explanation/sync.md.
RENEWAL = 4  # A full pool is renewed over this many rounds of rollouts: states change slowly, and rows cost bytes.


class Sample(NamedTuple):
    """Some states, and the parameters of the action distributions in them.

    Attributes:
        observations: One array `[n, ...]` per leaf.
        states: The recurrent states, each `[n, ...]`; empty if there are none.
        arrays: The parameters.
    """

    observations: list[Array]
    states: State
    arrays: dict[str, Array]

    def __len__(self) -> int:
        return len(self.observations[0])

    def after(self, count: int, form: Form) -> Sample:
        """Copy all rows after the first `count`."""
        rows = np.arange(count, len(self))
        return Sample(
            [array[rows] for array in self.observations],
            {name: array[rows] for name, array in self.states.items()},
            form.pick(self.arrays, rows),
        )


class Pool:
    """The newest samples of one version.

    Args:
        form: The form of the version's distributions.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        self._samples: deque[Sample] = deque()
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def row_bytes(self) -> int:
        """The size of one row; 0 if the pool is empty."""
        if not self._samples:
            return 0
        sample = self._samples[0]
        named = [*sample.states.values(), *(sample.arrays[name] for name in self._form.per_state)]
        return sum(array[:1].nbytes for array in [*sample.observations, *named])

    def add(self, sample: Sample, at_most: int) -> None:
        """Add a sample, and drop the oldest rows beyond `at_most`."""
        self._samples.append(sample)
        self._num_rows += len(sample)
        self.trim(at_most)

    def trim(self, at_most: int) -> None:
        """Drop the oldest rows beyond `at_most`."""
        while (excess := self._num_rows - at_most) > 0:
            oldest = self._samples.popleft()
            if len(oldest) > excess:
                self._samples.appendleft(oldest.after(excess, self._form))
            self._num_rows -= min(excess, len(oldest))

    def diverges_from(self, newest: Policy, nest: Nest, measure: Measure = "kl") -> float:
        """Estimate the divergence of this version from the newest, in nats; infinite if it is in any state.

        Args:
            newest: Another version of the policy.
            nest: Turns leaves into observations as the policy takes them.
            measure: How to measure the divergence.

        Raises:
            PolicyError: The newest policy raised, or returned NaN, most likely because training has diverged.
        """
        merged = self._merge()
        found = distribution_of(newest, nest(merged.observations), merged.states or None)
        assert found is not None, "it has a form"
        found.check()
        return measure_divergence(found.read(self._form.family, merged.arrays), found, measure)

    def _merge(self) -> Sample:
        """Merge all samples into one."""
        if len(self._samples) > 1:
            columns = zip(*(sample.observations for sample in self._samples), strict=True)
            first = self._samples[0]
            merged = Sample(
                [np.concatenate(column) for column in columns],
                {name: np.concatenate([sample.states[name] for sample in self._samples]) for name in first.states},
                self._form.join([sample.arrays for sample in self._samples]),
            )
            self._samples = deque([merged])
        return self._samples[0]
