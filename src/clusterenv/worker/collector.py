"""Collector: runs a policy beside the environments, and fills rollouts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.policy import Decision, Policy, State, start_episodes
from clusterenv.policy.probes import Probes
from clusterenv.wire.buffers import RolloutBuffers, describe
from clusterenv.wire.layout import Layout
from clusterenv.wire.messages import ArraySpec
from clusterenv.worker.choices import Choices, checked_state
from clusterenv.worker.episodes import EpisodeLedger
from clusterenv.worker.host import Host
from clusterenv.worker.infos import Infos, complete, info_row
from clusterenv.worker.masks import NAME, ActionMasks
from clusterenv.worker.prober import Prober, Probing

OnStep = Callable[[int], None]

_NEVER_NAN = frozenset({"logprob", "value"})


class Collector:
    """One policy and the environments it acts in.

    Attributes:
        version: The version of the weights the policy holds; 0 before it was given any.
        is_stepping: Whether the environments, not the policy, are running; not reset when something raises.
    """

    is_stepping = False

    def __init__(
        self,
        policy: Policy,
        host: Host,
        spaces: tuple[Space[Any], Space[Any]],
        mode: AutoresetMode,
        masks: ActionMasks,
        *,
        start: int,
        is_at_start: bool,
        seeds: Sequence[int | None],
    ) -> None:
        """Put a policy beside a host.

        Args:
            policy: Acts for all environments of the host.
            host: The environments.
            spaces: The observation and action space of one environment.
            mode: How the host resets.
            masks: Which actions the environments allow.
            start: The run-wide index of the first environment.
            is_at_start: Whether the environments have not been stepped since their reset.
            seeds: What they were reset with.
        """
        self._host = host
        self._mode = mode
        self._masks = masks
        self._start = start
        self._rows = len(host.buffers.rewards)
        observation_space, action_space = spaces
        self._observations, self._actions = Layout(observation_space), Layout(action_space)
        self._choices = Choices(action_space, self._rows)
        self._observation_space = observation_space
        self._starts = np.ones(self._rows, np.bool_)
        self._pending = host.buffers.terminations | host.buffers.truncations
        if mode is AutoresetMode.SAME_STEP:
            self._pending[:] = False
        self._ledger = EpisodeLedger(self._rows, is_at_start=is_at_start, seeds=seeds)
        self._ledger.restart(self._pending)  # Their next step is a reset: an episode seen from its start.
        self.replace(policy)

    def replace(self, policy: Policy) -> None:
        """Let another policy continue from here; a recurrent one begins without memory."""
        self.version = 0
        self.policy = policy
        self._takes_masks = NAME in getattr(policy, "takes", ())
        self._prober = Prober(policy, self._observations, self._rows, self._start)
        self._state: State | None = checked_state(policy.initial_state(self._rows))
        self._before: State | None = None

    def rehearse(self, values: Mapping[str, Any]) -> tuple[list[ArraySpec], list[ArraySpec]]:
        """Let the policy act once on made-up observations, and describe what it returns besides actions.

        Args:
            values: Per-call values, as the first call has them.

        Raises:
            PolicyError: The policy's actions do not have the form of the action space.
        """
        space = copy.deepcopy(self._observation_space)  # The user's own space must not be seeded.
        space.seed(0)
        samples = [self._observations.flatten(space.sample()) for _ in range(self._rows)]
        batch = self._observations.nest(
            [
                np.stack([np.asarray(part, leaf.dtype) for part in column])
                for leaf, column in zip(self._observations.leaves, zip(*samples, strict=True), strict=True)
            ]
        )
        decision = self.policy.act(batch, self._state, self._with_masks(values))
        self._choices.check(decision, are_real=False)
        self._check_extras(decision)
        if self._state is not None and decision.state is None:
            raise PolicyError(
                "The policy has an initial_state(), but act() returned no state: a recurrent policy's act() must "
                "return Decision(action, extras, state)."
            )
        extras = self._with_mask_extra(decision.extras)
        wanted = getattr(self.policy, "wanted", None)
        if wanted is not None:
            if unknown := [name for name in wanted if name not in extras]:
                raise PolicyError(
                    f"extras={tuple(wanted)} asks for {', '.join(unknown)}, which the policy does not return. It "
                    f"returns: {', '.join(extras) or 'nothing besides actions'}."
                )
            extras = {name: extras[name] for name in wanted}
        return describe(extras), describe(decision.state or {})

    def restart(self, mask: NDArray[np.bool_], seeds: Sequence[int | None], seed: int | None) -> None:
        """Note that these environments were reset.

        Args:
            mask: Which environments.
            seeds: One seed per environment, whether it was reset or not.
            seed: If given, the policy is reseeded as well.
        """
        self._starts |= mask
        self._pending &= ~mask
        self._ledger.restart(mask, seeds)
        if seed is not None:
            self.policy.seed(seed)
            self._prober.restart()

    def name_seeds(self, seeds: Sequence[int | None]) -> None:
        """Record the seeds that the current episodes were reset with."""
        self._ledger.name_seeds(seeds)

    def resume_after_error(self) -> None:
        """Find out from the host how far a step got in which an environment raised."""
        rows = self._host.pending_rows()
        if rows is None:
            return
        pending = np.array(rows, np.bool_)
        known = pending != self._pending  # Their episodes have ended or begun; others may lack a reward.
        self._starts |= self._pending & ~pending
        self._pending = pending
        self._ledger.spoil(~known)
        self._ledger.restart(known)

    def load(self, version: int, weights: Mapping[str, NDArray[Any]]) -> None:
        """Take new weights."""
        self.policy.load(weights)
        self.version = version

    def collect(
        self, block: RolloutBuffers, num_probes: int, values: Mapping[str, Any], on_step: OnStep | None = None
    ) -> tuple[dict[str, Any], Probes | None]:
        """Make a rollout.

        Args:
            block: This shard's columns.
            num_probes: At how many rows to report how actions were distributed.
            values: Per-call values for the policy.
            on_step: Called after each step with the number of steps so far.

        Returns:
            The summary: each environment's position at the beginning, the finished episodes, the final observations
            that are not in the block, and forgiven exceptions (rows and texts). And the probes, if requested and
            available.
        """
        self.is_stepping = False
        positions = self._ledger.positions()
        num_steps = len(block.rewards)
        finals: list[tuple[int, int, list[Any]]] = []
        self._errors: list[list[Any]] = []
        for column, newest in zip(block.observations, self._host.buffers.observations, strict=True):
            column[0] = newest
        probing = self._begin_probing(num_steps, num_probes, block) if num_probes else None
        self._last_infos: dict[tuple[int, int], Infos] = {}
        made = reached = 0
        try:
            for step in range(num_steps):
                actions = self._decide([column[step] for column in block.observations], block, step, values, probing)
                self._host.observe_into([column[step + 1] for column in block.observations])
                reached = step + 1  # Even if an environment raises: the host makes sure that every row is filled.
                self.is_stepping = True
                infos = complete(self._host.step(None, actions, for_rollout=True), self._rows)
                self.is_stepping = False
                self._note(block, step, infos, finals)
                if self._masks.current is not None:
                    self._masks.step(infos)
                made = step + 1
                if on_step is not None:
                    on_step(made)
        finally:
            # Also after an exception, since the next call continues from here.
            self._host.observe_into(None)
            for column, newest in zip(block.observations, self._host.buffers.observations, strict=True):
                newest[...] = column[reached]  # type: ignore[index]  # no leaf of objects gets this far
            done = (block.terminations | block.truncations)[:made]
            episodes = self._ledger.add(block.rewards[:made], block.valid[:made], done)
        for name in _NEVER_NAN & block.extras.keys():
            if np.isnan(block.extras[name]).any():
                raise PolicyError(f"The policy's {name} holds NaN. Has training diverged?")
        probes = None if probing is None else self._prober.finish(probing, block, may_keep=self._may_keep(values))
        summary = {
            "positions": positions,
            "episodes": {
                "row": episodes.row,
                "step": episodes.step,
                "return": episodes.return_,
                "length": episodes.length,
                "info": [
                    self._last_infos.get(end, {})
                    for end in zip(episodes.step.tolist(), episodes.row.tolist(), strict=True)
                ],
            },
            "finals": _stack_finals(finals, len(self._observations.leaves)),
            "errors": self._errors,
        }
        return summary, probes

    def decide(self, buffer: int, num_probes: int, values: Mapping[str, Any]) -> tuple[Infos, Probes | None]:
        """Choose actions and step once into this step buffer.

        Returns:
            The infos, which include the decision, and the probes, as for `collect`.
        """
        self.is_stepping = False
        observations = list(self._host.buffers.observations)
        decision = self._act(observations, values)
        actions = self._choices.check(decision)
        probes = None
        if num_probes:
            may_keep = self._may_keep(values)
            probes = self._prober.probe_step(
                decision, observations, self._before, ~self._pending, num_probes, may_keep=may_keep
            )
        extras = self._with_mask_extra(decision.extras)
        batch = self._choices.split(actions, is_batched=self._host.takes_batches)
        self.is_stepping = True
        infos = complete(self._host.step(buffer, batch), self._rows)
        self.is_stepping = False
        if self._masks.current is not None:
            self._masks.step(infos)
        self.account()
        version = np.full(self._rows, self.version, np.int64)
        extras.pop(NAME, None)  # As in other steps, infos hold the mask for the next action under that name.
        return {**infos, "action": self._actions.nest(actions), **extras, "policy_version": version}, probes

    def account(self) -> None:
        """Count a step that is not part of a rollout."""
        taken = ~self._pending
        buffers = self._host.buffers
        done = (buffers.terminations | buffers.truncations) & taken
        self._ledger.add(buffers.rewards[None], taken[None], done[None])
        self._advance(taken, done)

    def _act(self, observations: list[Any], values: Mapping[str, Any]) -> Decision:
        if self._state is not None:
            initial = self.policy.initial_state(self._rows)
            assert initial is not None
            self._state = start_episodes(self._state, initial, self._starts)
        before = self._state
        if self._takes_masks:
            values = self._with_masks(values)
        decision = self.policy.act(self._observations.nest(observations), before, values)
        self._state, self._before = decision.state, before
        return decision

    def _begin_probing(self, num_steps: int, num_probes: int, block: RolloutBuffers) -> Probing | None:
        first = [column[0] for column in block.observations]
        return self._prober.begin(num_steps, num_probes, first, self._state)

    def _may_keep(self, values: Mapping[str, Any]) -> bool:
        """Whether the policy's decisions depend on nothing but observations and its own state."""
        return not values and not (self._takes_masks and self._masks.current is not None)

    def _decide(
        self,
        observations: list[Any],
        block: RolloutBuffers,
        step: int,
        values: Mapping[str, Any],
        probing: Probing | None,
    ) -> Any:
        decision = self._act(observations, values)
        if probing is not None and probing.is_due(step):
            probing.note(decision)
        actions = self._choices.check(decision)
        for column, action in zip(block.actions, actions, strict=True):
            column[step] = action
        extras = decision.extras if self._masks.current is None else self._with_mask_extra(decision.extras)
        for name, column in block.extras.items():
            extra = extras.get(name)
            if extra is None or extra.shape != column.shape[1:]:
                got = "none" if extra is None else f"shape {extra.shape}"
                raise PolicyError(
                    f"The policy's {name} must have shape {column.shape[1:]} of {column.dtype}, as at its first call, "
                    f"got {got}. A policy must return the same extras at every call."
                )
            column[step] = extra
        for name, column in block.states.items():
            column[step] = self._before[name]  # type: ignore[index]  # a block has states only if the policy has
        return self._choices.split(actions, is_batched=self._host.takes_batches)

    def _note(self, block: RolloutBuffers, step: int, infos: Infos, finals: list[Any]) -> None:
        buffers = self._host.buffers
        if self._host.errors:
            self._errors += [[row, text] for row, text in self._host.errors]
        block.valid[step] = taken = ~self._pending
        block.rewards[step] = buffers.rewards
        block.terminations[step] = buffers.terminations & taken
        block.truncations[step] = buffers.truncations & taken
        done = block.terminations[step] | block.truncations[step]
        is_same_step = self._mode is AutoresetMode.SAME_STEP
        if (infos or is_same_step) and np.count_nonzero(done):
            last = infos.get("final_info", {}) if is_same_step else infos
            for row in done.nonzero()[0].tolist():
                self._last_infos[step, row] = info_row(last, row)
                if is_same_step:
                    finals.append((step, row, self._observations.flatten(infos["final_obs"][row])))
        self._advance(taken, done)

    def _advance(self, taken: NDArray[np.bool_], done: NDArray[np.bool_]) -> None:
        """Note which observations are now an episode's first, and which environments ignore the next action."""
        if self._mode is AutoresetMode.SAME_STEP:
            self._starts = done
        elif self._mode is AutoresetMode.NEXT_STEP:
            self._starts, self._pending = ~taken, done
        else:
            self._starts = np.zeros(self._rows, np.bool_)
            self._pending = self._pending | done

    def _with_masks(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return per-call values along with the action masks, if there are any and the policy takes them."""
        masks = self._masks.current
        return values if masks is None or not self._takes_masks else {NAME: masks, **values}

    def _with_mask_extra(self, extras: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        masks = self._masks.current
        return dict(extras) if masks is None else {NAME: masks, **extras}

    def _check_extras(self, decision: Decision) -> None:
        for name, extra in decision.extras.items():
            if not isinstance(extra, np.ndarray) or extra.shape[:1] != (self._rows,) or extra.dtype.kind not in "biufc":
                got = f"{extra.dtype} of shape {extra.shape}" if isinstance(extra, np.ndarray) else type(extra).__name__
                raise PolicyError(
                    f"The policy's {name} must be an array of numbers with one row for each of the {self._rows} "
                    f"environments of its worker, got {got}."
                )


def _stack_finals(finals: list[tuple[int, int, list[Any]]], num_leaves: int) -> dict[str, Any]:
    leaves = (
        [np.stack([np.asarray(final[2][leaf]) for final in finals]) for leaf in range(num_leaves)] if finals else []
    )
    return {
        "step": np.array([final[0] for final in finals], np.int64),
        "row": np.array([final[1] for final in finals], np.int64),
        "leaves": leaves,
    }
