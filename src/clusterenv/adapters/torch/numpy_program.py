"""A torch policy as a numpy program: found, checked against the agent itself, and checked again with every version."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clusterenv.adapters.torch.distributions import draw_again, read
from clusterenv.adapters.torch.module import TORCH, Evaluation, Randomness, as_array
from clusterenv.adapters.torch.trace import NoProgram, Recorder, Sheet, Traced
from clusterenv.policy.contents import Contents
from clusterenv.policy.distribution import Array, Distribution
from clusterenv.policy.families import Categorical, MultiCategorical
from clusterenv.policy.policy import Tree, map_tree
from clusterenv.policy.program import CONSTANTS, Evaluator, Program, ProgramPolicy, leaves_of, paths_of
from clusterenv.policy.weights import Weights, WeightsSpec

if TYPE_CHECKING:
    from clusterenv.adapters.torch.policy import TorchPolicy

_TRACE_ROWS = 61  # A prime, so that a shape that holds the number of rows shows it.
_TRIAL_ROWS = (7, 16)
# Rows times columns times what is summed over. Larger products wake OpenBLAS's threads, which then spin for tens of
# milliseconds on a core where workers could run.
_CALM_PRODUCT = 1 << 18
_MIN_ROWS = 4  # For wide networks so few rows would fit that threads are the better choice.


class NumpyProgram:
    """A numpy program that replaces a torch module.

    The learner's own module is never run: a copy of it, like a worker's, is given each version's weights.

    Attributes:
        program: The program.
    """

    def __init__(self, policy: TorchPolicy, twin: TorchPolicy, obs: Tree) -> None:
        self._twin = twin
        self._evaluation, self._randomness = Evaluation(twin.module), Randomness(0)
        self._generation = policy.contents.generation
        self._paths = paths_of(obs)
        self._trace(policy, obs)

    @staticmethod
    def find(policy: TorchPolicy, obs: Tree) -> NumpyProgram | None:
        """Return a program that does what the policy's module does; None if there is none."""
        if not policy.is_traceable:
            return None
        try:
            return NumpyProgram(policy, policy.copy_here(), obs)
        except Exception:  # noqa: BLE001 - whatever is wrong, the agent's own method can be used instead
            return None

    @property
    def program(self) -> Program:
        """The program."""
        return self._traced.program

    def renew(self, policy: TorchPolicy, obs: Tree) -> NumpyProgram | None:
        """Check the program with the current weights; return self, traced again if necessary, or None."""
        if policy.contents.generation != self._generation:
            return NumpyProgram.find(policy, obs)
        try:
            values = self._load(policy)
            if values != self._values or not self._agrees(policy, obs, _TRIAL_ROWS[-1]):
                self._trace(policy, obs)
        except Exception:  # noqa: BLE001 - as above
            return None
        return self

    def weights(self, policy: TorchPolicy) -> dict[str, Array]:
        """Return the arrays that the program reads, and its constants."""
        return self._pick(policy.contents.weights())

    def _pick(self, arrays: Weights) -> dict[str, Array]:
        return {**{name: arrays[name] for name in self._names}, CONSTANTS: self._traced.constants}

    def reduce(self, policy: TorchPolicy) -> tuple[Any, ...]:
        """Pickle as a policy that does not need torch."""
        return ProgramPolicy, (self._traced.program, WeightsSpec.of(self.weights(policy)), self._paths)

    def distribution(self, policy: TorchPolicy, obs: Tree) -> Distribution | None:
        """Return the distributions on observations, if the program was checked with the current weights; else None."""
        if policy.stamp() != self._stamp:
            return None
        leaves = leaves_of(obs, self._paths)
        size = self._calm_rows(len(leaves[0]))
        starts = range(0, len(leaves[0]), size)
        parts = [self._evaluator([leaf[start : start + size] for leaf in leaves])[0] for start in starts]
        if len(parts) == 1:
            return parts[0]
        arrays = [part.to_arrays()[1] for part in parts]
        return parts[0].with_arrays({name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]})

    def _calm_rows(self, num_rows: int) -> int:
        """Return how many rows to evaluate at once: few enough not to wake numpy's threads, if possible, or all."""
        largest = max((self._carried[name].size for name in self._names if self._carried[name].ndim > 1), default=1)
        calm = _CALM_PRODUCT // largest
        return min(num_rows, calm) if calm >= _MIN_ROWS else num_rows

    def _load(self, policy: TorchPolicy) -> Hashable:
        """Load the current weights into the copy; return the plain values among them."""
        self._stamp = policy.stamp()
        self._carried = policy.contents.weights()
        self._twin.load(self._carried)
        return policy.contents.plain_values()

    def _trace(self, policy: TorchPolicy, obs: Tree) -> None:
        self._values = self._load(policy)
        twin = self._twin
        before = Contents(twin.module, [TORCH], warns=False)
        stamp, drawn = before.stamp(), _random_state()
        rows = _resize(obs, _TRACE_ROWS)
        twin.inference.study(rows)
        assert twin.delivered is not None, "it is a copy"
        twin.delivered.empty_caches()  # What they keep would appear as constants.
        evaluation = self._evaluation
        with evaluation.quiet(), self._randomness.torch():
            tensors = map_tree(torch.clone, evaluation.tensors(rows))
            leaves: list[Any] = leaves_of(tensors, self._paths)
            if not all(leaf.dtype in (torch.float32, torch.float64) for leaf in leaves):
                raise NoProgram(f"observations of {leaves[0].dtype}")
            recorder = Recorder(leaves, twin.named_arrays())
            with recorder:
                sheet = twin.inference.sheet(tensors, _TRACE_ROWS)
            wanted = sheet.extras if policy.wanted is None else policy.wanted
            if unknown := set(wanted) - {"logprob", *sheet.extras}:
                raise NoProgram(f"it returns no {unknown}")  # The ordinary path says what there is.
            extras = {name: tensor for name, tensor in sheet.extras.items() if name in wanted}
            self._traced: Traced = recorder.finish(replace(sheet, extras=extras))
        if before.stamp() != stamp:
            raise NoProgram("the agent changes itself when it acts")
        if _random_state() != drawn:
            raise NoProgram("the agent draws random numbers of its own")
        self._names = self._traced.program.arrays()
        self._evaluator = Evaluator(self._traced.program, self._pick(self._carried))
        if not all(self._agrees(policy, obs, count) for count in _TRIAL_ROWS):
            raise NoProgram("what numpy returns is not what the agent returns")

    def _agrees(self, policy: TorchPolicy, obs: Tree, num_rows: int) -> bool:
        """Compare with the copy of the agent on some of the observations."""
        rows = _resize(obs, num_rows)
        twin = self._twin
        evaluation = self._evaluation
        with evaluation.quiet(), self._randomness.torch():
            state = torch.get_rng_state()
            sheet = twin.inference.sheet(evaluation.tensors(rows), num_rows)
            if sheet.action is not None and not _is_drawn(sheet.action, sheet, state):
                return False
            truth, extras = read(sheet), {name: as_array(value) for name, value in sheet.extras.items()}
        with np.errstate(all="ignore"):
            self._evaluator.refresh(self._pick(self._carried))
            own, own_extras = self._evaluator(leaves_of(rows, self._paths))
            return (
                type(own) is type(truth)
                and all(map(_is_close, _numbers(own), _numbers(truth)))
                and all(_is_close(own_extras[name].reshape(-1), extras[name].reshape(-1)) for name in own_extras)
            )


def _is_drawn(action: torch.Tensor, sheet: Sheet, state: torch.Tensor) -> bool:
    """Whether an agent's action is a draw from its distribution, and nothing else was drawn.

    Log-probabilities cannot show this: the mode, or a draw from another distribution, has matching ones, too.

    Args:
        action: The agent's action.
        sheet: The distribution.
        state: The state of torch's generator before the agent acted.
    """
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    drawn = draw_again(sheet)
    if drawn.numel() != action.numel() or not torch.equal(torch.get_rng_state(), after):
        return False
    return torch.allclose(drawn.reshape(-1).double(), action.reshape(-1).double(), rtol=1e-4, atol=1e-5)


def _random_state() -> Hashable:
    """Return the state of Python's and numpy's global generators, which changes with every draw."""
    return random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]  # type: ignore[index]  # a tuple


def _numbers(distribution: Distribution) -> list[Array]:
    """Return arrays that are equal for equal distributions; logits that differ by a constant count as equal."""
    arrays = list(distribution.to_arrays()[1].values())
    if isinstance(distribution, Categorical):
        return [arrays[0] - arrays[0].max(axis=-1, keepdims=True)]
    if isinstance(distribution, MultiCategorical):
        return [part.logits - part.logits.max(axis=-1, keepdims=True) for part in distribution._parts()]
    return [np.broadcast_to(array, arrays[0].shape) for array in arrays]


def _is_close(one: Array, other: Array) -> bool:
    bound = 1e-10 if one.dtype == np.float64 else 5e-5
    if one.shape != other.shape:
        return False
    if (np.abs(one - other) <= bound * (1.0 + np.abs(other))).all():  # With every version: isclose() takes longer.
        return True
    return bool(np.isclose(one, other, rtol=bound, atol=bound, equal_nan=True).all())


def _resize(obs: Tree, num_rows: int) -> Tree:
    def resize(rows: Array) -> Array:
        return rows[:num_rows] if len(rows) >= num_rows else np.take(rows, np.arange(num_rows) % len(rows), axis=0)

    resized: Tree = map_tree(resize, obs)
    return resized
