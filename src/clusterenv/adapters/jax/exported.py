"""A JAX network on a worker: its computation, exported by the head, and its parameters as arrays.

Neither the user's classes nor flax or equinox are needed here, only JAX itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from clusterenv.adapters.jax.outputs import Reader
from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution
from clusterenv.policy.policy import Decision, State, Tree, map_tree
from clusterenv.policy.weights import Weights, WeightsSpec

MASK = "action_mask"
_SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false"


class ExportedPolicy:
    """Runs an exported computation on the CPU.

    Args:
        computations: What `jax.export` made of `(arrays, observations, state, masks, seed)`: without masks and with
            them, as far as the network can be called so.
        mask_shape: The shape of one environment's mask.
        spec: The arrays, in the order in which the computation takes them; zeros until some are loaded.
        reader: Reads what the computation returns.
        initial: The initial recurrent state of one environment.
        has_doubles: Whether the head's JAX computes in float64.
    """

    def __init__(
        self,
        computations: dict[bool, bytes],
        mask_shape: tuple[int, ...] | None,
        spec: WeightsSpec,
        reader: Reader,
        initial: State | None,
        has_doubles: bool,
    ) -> None:
        jax = _import_jax()
        if has_doubles:
            jax.config.update("jax_enable_x64", True)
        cpu = jax.devices("cpu")[0]
        self._put: Callable[[list[Array]], Any] = lambda arrays: jax.device_put(arrays, cpu)
        exported = {with_mask: jax.export.deserialize(bytearray(data)) for with_mask, data in computations.items()}
        self._calls = {with_mask: jax.jit(each.call) for with_mask, each in exported.items()}
        # Whether the seed is used at all.
        self._draws = any(len(each.in_avals) - 1 in each.module_kept_var_idx for each in exported.values())
        self._mask_shape = mask_shape
        self.takes = frozenset({MASK}) if True in exported else frozenset[str]()
        self._reader = reader
        self._initial = initial
        self._rng = np.random.default_rng()
        self._spec = spec
        self.load({each.name: np.zeros(each.shape, each.dtype) for each in spec.arrays})

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        masks, values = split_masks(call) if self.takes else ({}, call)
        answer = self._run(obs, state, int(self._rng.integers(2**32)) if self._draws else 0, masks)
        return self._reader.decide(answer, count_rows(obs), self._rng, values)

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution | None:
        if False not in self._calls:
            return None
        return self._reader.distribution(self._run(obs, state, 0, {}), count_rows(obs))

    def weights(self) -> dict[str, Array]:
        return dict(self._weights)

    def load(self, weights: Weights) -> None:
        self._spec.check(weights)
        # Copied: the arrays may be the head's memory, and JAX would alias it.
        self._weights = {name: np.array(weights[name]) for name in (each.name for each in self._spec.arrays)}
        self._arrays = self._put(list(self._weights.values()))

    def stamp(self) -> Hashable:
        return None

    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def use_generator(self, rng: np.random.Generator) -> None:
        """Draw from this generator whenever the policy, rather than the network, draws."""
        self._rng = rng

    def initial_state(self, num_envs: int) -> State | None:
        return repeat_state(self._initial, num_envs)

    def _run(self, obs: Tree, state: State | None, seed: int, masks: dict[str, Array]) -> Any:
        if state is None:
            state = self.initial_state(count_rows(obs)) or {}
        call = self._calls.get(bool(masks))
        if call is None:
            raise needs_mask()
        check_masks(masks, self._mask_shape)
        # Copied, because the caller's memory is written to again, and JAX may alias it.
        return call(self._arrays, map_tree(np.array, obs), state, masks, np.uint32(seed))


def split_masks(call: Call) -> tuple[dict[str, Array], Call]:
    """Return the masks of a call, as booleans, and its other values."""
    if MASK not in call:
        return {}, call
    return {MASK: np.asarray(call[MASK]) != 0}, {name: value for name, value in call.items() if name != MASK}


def needs_mask() -> PolicyError:
    """Return the error that a network cannot be called without masks."""
    return PolicyError(
        f"The network needs {MASK}, but the environments' infos hold none: each reset() and step() should return one "
        f"in info['{MASK}']."
    )


def check_masks(masks: dict[str, Array], shape: tuple[int, ...] | None) -> None:
    """Refuse masks whose shape is not the one the network was exported for.

    Raises:
        PolicyError: The shapes differ.
    """
    if masks and shape is not None and masks[MASK].shape[1:] != shape:
        raise PolicyError(
            f"info['{MASK}'] must have a value for each action, shape {shape}, got shape {masks[MASK].shape[1:]}."
        )


def count_rows(tree: Tree) -> int:
    """Return the number of environments in nested observations."""
    while not isinstance(tree, np.ndarray):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)


def repeat_state(initial: State | None, num_envs: int) -> State | None:
    """Repeat the state of one environment for several."""
    return None if initial is None else {name: np.repeat(part, num_envs, axis=0) for name, part in initial.items()}


def _import_jax() -> Any:
    """Import JAX; on first import, for the CPU only and with as many threads as the worker was given.

    Otherwise each worker would take most of a GPU's memory as soon as JAX finds one.
    """
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        flags = os.environ.get("XLA_FLAGS", "")
        if os.environ.get("OMP_NUM_THREADS") == "1" and "multi_thread_eigen" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {_SINGLE_THREADED}".strip()
    import jax
    import jax.export

    return jax
