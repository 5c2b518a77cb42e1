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
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution
from clusterenv.policy.policy import Decision, State, Tree, map_tree
from clusterenv.policy.weights import Weights, WeightsSpec

_SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false"


class ExportedPolicy:
    """Runs an exported computation on the CPU.

    Args:
        computation: What `jax.export` made of `(arrays, observations, state, seed)`.
        spec: The arrays, in the order in which the computation takes them; zeros until some are loaded.
        reader: Reads what it returns.
        initial: The initial recurrent state of one environment.
        has_doubles: Whether the head's JAX computes in float64.
    """

    def __init__(
        self, computation: bytes, spec: WeightsSpec, reader: Reader, initial: State | None, has_doubles: bool
    ) -> None:
        jax = _import_jax()
        if has_doubles:
            jax.config.update("jax_enable_x64", True)
        cpu = jax.devices("cpu")[0]
        self._put: Callable[[list[Array]], Any] = lambda arrays: jax.device_put(arrays, cpu)
        exported = jax.export.deserialize(bytearray(computation))
        self._call = jax.jit(exported.call)
        self._draws = len(exported.in_avals) - 1 in exported.module_kept_var_idx  # Whether the seed is used at all.
        self._reader = reader
        self._initial = initial
        self._rng = np.random.default_rng()
        self._spec = spec
        self.load({each.name: np.zeros(each.shape, each.dtype) for each in spec.arrays})

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        answer = self._run(obs, state, int(self._rng.integers(2**32)) if self._draws else 0)
        return self._reader.decide(answer, count_rows(obs), self._rng, call)

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution | None:
        return self._reader.distribution(self._run(obs, state, 0), count_rows(obs))

    def weights(self) -> dict[str, Array]:
        return dict(self._weights)

    def load(self, weights: Weights) -> None:
        self._spec.check(weights)
        # Copied: what is given may be the head's memory, and JAX would alias it.
        self._weights = {name: np.array(weights[name]) for name in (each.name for each in self._spec.arrays)}
        self._arrays = self._put(list(self._weights.values()))

    def stamp(self) -> Hashable:
        return None

    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def use_generator(self, rng: np.random.Generator) -> None:
        """Draw from this generator, where it is not the network that draws."""
        self._rng = rng

    def initial_state(self, num_envs: int) -> State | None:
        return repeat_state(self._initial, num_envs)

    def _run(self, obs: Tree, state: State | None, seed: int) -> Any:
        if state is None:
            state = self.initial_state(count_rows(obs)) or {}
        # Copied, because the caller's memory is written to again, and JAX may alias it.
        return self._call(self._arrays, map_tree(np.array, obs), state, np.uint32(seed))


def count_rows(tree: Tree) -> int:
    """Return the number of environments that nested observations are of."""
    while not isinstance(tree, np.ndarray):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)


def repeat_state(initial: State | None, num_envs: int) -> State | None:
    """Return the state of one environment as that of several."""
    return None if initial is None else {name: np.repeat(part, num_envs, axis=0) for name, part in initial.items()}


def _import_jax() -> Any:
    """Import JAX; if nobody has yet, for the CPU alone and with as many threads as the worker was given.

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
