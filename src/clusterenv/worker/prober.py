"""Prober: reports how a policy's actions were distributed at some rows of its steps and rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.policy.policy import Decision, Policy, State
from clusterenv.policy.probes import Form, Probes, spread, take
from clusterenv.wire.buffers import RolloutBuffers
from clusterenv.wire.layout import Layout


class Prober:
    """Gathers the parameters of one policy's distributions while it acts.

    If `act` returns the distribution it drew from, that is kept, which costs nothing; otherwise the policy is evaluated
    once more, at all chosen rows of the rollout together.

    Args:
        policy: The policy.
        observations: The layout of observations.
        num_rows: How many environments the policy acts in.
        seed: Seeds the choice of rows.
    """

    def __init__(self, policy: Policy, observations: Layout, num_rows: int, seed: int) -> None:
        self._policy = policy
        self._observations = observations
        self._num_rows = num_rows
        self._seed = seed
        self._form: Form | None = None
        self._is_studied = False
        self._may_trust: bool | None = None  # Whether `act` and `distribution` return the same.
        self.restart()

    def restart(self) -> None:
        """Restart the random choice of rows."""
        self._rng = np.random.default_rng(self._seed)

    def begin(self, num_steps: int, count: int, observations: Sequence[Any], state: State | None) -> Probing | None:
        """Begin a rollout of which distributions are wanted at some rows; None if the policy has none.

        Args:
            num_steps: The length of the rollout.
            count: How many rows.
            observations: The first observations, by leaf.
            state: The first recurrent state.
        """
        if not self._is_studied:
            self._is_studied = True
            self._form = Form.of(self._policy, self._observations.nest(list(observations)), state)
        if self._form is None or not count:
            return None
        return Probing(spread(count, num_steps, self._rng), count)

    def finish(self, probing: Probing, block: RolloutBuffers, *, may_keep: bool) -> Probes | None:
        """Return the probes of a finished rollout; None if no action was taken at the chosen steps.

        Args:
            probing: What `begin` returned.
            block: The rollout.
            may_keep: Whether the policy's distributions depend only on observations and recurrent states.
        """
        steps, kept = probing.steps, probing.kept
        chosen = self._choose(block.valid[steps], probing.count)
        of_steps, rows = steps[chosen // self._num_rows], chosen % self._num_rows
        leaves = [column[of_steps, rows] for column in block.observations]
        states = {name: column[of_steps, rows] for name, column in block.states.items()}
        return self._describe(
            of_steps * self._num_rows + rows, leaves, states, chosen, kept if len(kept) == len(steps) else [], may_keep
        )

    def probe_step(
        self,
        decision: Decision,
        observations: Sequence[Any],
        state: State | None,
        taken: NDArray[np.bool_],
        count: int,
        *,
        may_keep: bool,
    ) -> Probes | None:
        """Return the distributions of a single step, with the recurrent states.

        Args:
            decision: What the policy decided.
            observations: The observations it decided on, by leaf.
            state: The recurrent state it decided in.
            taken: Which environments take their action.
            count: How many rows are wanted.
            may_keep: As for `finish`.
        """
        probing = self.begin(1, count, observations, state)
        if probing is None:
            return None
        probing.note(decision)
        chosen = self._choose(taken, count)
        states = {} if state is None else {name: array[chosen] for name, array in state.items()}
        leaves = [np.asarray(array)[chosen] for array in observations]
        probes = self._describe(chosen, leaves, states, chosen, probing.kept, may_keep)
        return None if probes is None else probes._replace(states=states)

    def _choose(self, valid: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
        candidates = np.flatnonzero(valid)
        chosen: NDArray[np.int64] = candidates[spread(count, len(candidates), self._rng)]
        return chosen

    def _describe(
        self,
        rows: NDArray[np.int64],
        leaves: list[NDArray[Any]],
        states: State,
        chosen: NDArray[np.int64],
        kept: list[dict[str, NDArray[Any]]],
        may_keep: bool,
    ) -> Probes | None:
        form = self._form
        assert form is not None, "this has begun"
        if not len(rows):
            return None
        arrays = form.pick(form.join(kept), chosen) if kept and may_keep and self._may_trust is not False else None
        if arrays is None or self._may_trust is None:
            probed = take((self._observations.nest(leaves), states or None), slice(None))
            found = self._policy.distribution(*probed)
            assert found is not None, "it has a form"
            evaluated = found.to_arrays()[1]
            if arrays is not None:
                self._may_trust = _are_close(arrays, evaluated)
            arrays = evaluated
        form.check(form.family, arrays, len(rows))
        return Probes(rows.astype(np.uint32), form.family, arrays, {})


class Probing:
    """One rollout's distributions, as far as they are known.

    Attributes:
        steps: The chosen steps, ascending.
        count: How many rows of these steps are wanted.
        kept: The distributions at these steps, if the policy returns them.
    """

    def __init__(self, steps: NDArray[np.int64], count: int) -> None:
        self.steps = steps
        self.count = count
        self.kept: list[dict[str, NDArray[Any]]] = []
        self._due = iter(steps.tolist())
        self._next: int | None = next(self._due)

    def is_due(self, step: int) -> bool:
        """Whether this step is chosen; must be called for every step in order."""
        if step != self._next:
            return False
        self._next = next(self._due, None)
        return True

    def note(self, decision: Decision) -> None:
        """Keep the distribution of a decision, which the policy will not write to again."""
        if decision.distribution is not None:
            self.kept.append(decision.distribution.to_arrays()[1])


def _are_close(some: dict[str, NDArray[Any]], others: dict[str, NDArray[Any]]) -> bool:
    """Whether these are the same except for rounding."""
    return some.keys() == others.keys() and all(
        some[name].shape == array.shape and np.allclose(some[name], array, rtol=1e-3, atol=1e-4)
        for name, array in others.items()
    )
