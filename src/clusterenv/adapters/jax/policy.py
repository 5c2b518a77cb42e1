"""A JAX network as a policy: run as it is on the head, exported for the workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

from clusterenv.adapters.jax.exported import (
    MASK,
    ExportedPolicy,
    count_rows,
    needs_mask,
    repeat_state,
    split_masks,
)
from clusterenv.adapters.jax.networks import Masks, MaskUse, Network, read_network
from clusterenv.adapters.jax.outputs import OUTPUTS, Output, Reader
from clusterenv.errors import ConfigError, PolicyError
from clusterenv.policy.array_kinds import NumpyArrays
from clusterenv.policy.contents import Contents
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution
from clusterenv.policy.policy import Decision, State, Tree, map_tree
from clusterenv.policy.weights import Weights, WeightsSpec


class JaxPolicy:
    """A JAX network that chooses actions on workers.

    Give a flax.nnx or equinox module, which holds its parameters; or, with its parameters, a flax.linen module or a
    function of parameters and observations. An equinox module is called with one observation, anything else with a
    batch. An argument named `key` receives a new random key at each call; one named `action_mask` receives a boolean
    mask of the actions that the environments allow.

    Changes reach the workers with the next call: writes to an nnx module, or whatever is assigned to `params`. Workers
    need JAX, but neither flax nor equinox: they get the network's computation, traced and exported on the head for any
    number of environments, and the values of its arrays.

    Args:
        network: The module or function.
        params: A pytree of arrays; None for modules that hold their own.
        output: What the network returns: "logits" or "q" `[n, actions]`, a list of logits for MultiDiscrete actions,
            "action" (deterministic), or the two results `mean, log_std` of a "gaussian" or "squashed" Gaussian. The
            value of each state may follow as one more result. None: a dict with "action", drawn with `key`, and
            whatever else the learner wants.
        initial_state: Maps the number of environments to a dict of arrays `[n, ...]`. The network then takes such a
            dict besides the observations (a function: as `state`), and returns the next one as its last result.
        scale: The factor applied to a squashed action after tanh; for "action", half the width of its range.
        shift: The offset added after that; for "action", the middle of its range. Given together with `scale`.

    Raises:
        PolicyError: `network` is not a network, or its parameters are missing.
    """

    def __init__(
        self,
        network: Any,
        params: Any = None,
        *,
        output: Output | None = None,
        initial_state: Callable[[int], Mapping[str, Any]] | None = None,
        scale: Any = None,
        shift: Any = None,
    ) -> None:
        if output is not None and output not in OUTPUTS:
            raise ConfigError(f"JaxPolicy(output=...) must be one of {', '.join(OUTPUTS)}; got {output!r}.")
        if (scale is None) != (shift is None):
            raise ConfigError("JaxPolicy(scale=...) and shift=... come together.")
        self._network, self.params = read_network(network, params)
        bounds = [None if value is None else np.asarray(value, np.float32).reshape(-1) for value in (scale, shift)]
        self._reader = Reader(output, initial_state is not None, *bounds)
        self._initial = None if initial_state is None else _as_state(initial_state(1))
        self.contents = Contents([self._network, self._reader, self._initial], [_JaxArrays()])
        self._rng = np.random.default_rng()
        self._snapshot = _Snapshot.of(self._network, self.params)
        self._num_changes = self._num_restarts = 0
        self._closure: Hashable = self.contents.stamp()
        self._shapes: Any = None
        self._mask_shape: tuple[int, ...] | None = None
        self._exported: dict[bool, bytes] | None = None
        self._restart()

    @property
    def generation(self) -> int:
        """How often what is sent to workers, other than arrays, has changed."""
        return self._num_restarts

    def announce(self) -> None:
        """Treat whatever cannot be compared as changed."""
        self._restart()

    @property
    def takes(self) -> frozenset[str]:
        """The per-call values that the network has parameters for."""
        return frozenset() if self._network.mask is MaskUse.NONE else frozenset({MASK})

    def look_at(self, obs: Tree, action_space: Space[Any]) -> None:
        """Note the shapes of observations and masks."""
        shapes = map_tree(lambda rows: _shape(rows.shape[1:], rows.dtype), obs)
        mask_shape = _shape_of_masks(action_space)
        if (shapes, mask_shape) != (self._shapes, self._mask_shape):
            self._shapes, self._mask_shape = shapes, mask_shape
            self._restart()

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        self.stamp()
        masks, values = split_masks(call) if self.takes else ({}, call)
        answer = self._run(obs, state, int(self._rng.integers(2**32)), masks)
        return self._reader.decide(answer, count_rows(obs), self._rng, values)

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution | None:
        """Return the action distributions for a batch with all actions allowed; None if there are none."""
        if self._network.mask is MaskUse.NEEDED:
            return None
        self.stamp()
        return self._reader.distribution(self._run(obs, state, 0, {}), count_rows(obs))

    def weights(self) -> dict[str, Array]:
        """Return all arrays by name."""
        self.stamp()
        return {name: np.asarray(array) for name, array in zip(self._names, self._snapshot.arrays(), strict=True)}

    def load(self, weights: Weights) -> None:
        raise PolicyError("Only a worker's copy of a policy is loaded: assign to `params` instead.")

    def stamp(self) -> Hashable:
        """Return a value that changes with the parameters and with whatever the network refers to."""
        snapshot, closure = _Snapshot.of(self._network, self.params), self.contents.stamp()
        if closure != self._closure or not snapshot.is_alike(self._snapshot):
            self._closure, self._snapshot = closure, snapshot
            self._restart()
        elif not snapshot.is_same(self._snapshot):
            self._num_changes += 1
            self._snapshot = snapshot  # Kept alive, so that no new array can have the identity of an old one.
        return self._num_restarts, self._num_changes

    def seed(self, seed: int) -> None:
        """Make all further random choices depend on this seed alone."""
        self._rng = np.random.default_rng(seed)

    def use_generator(self, rng: np.random.Generator) -> None:
        """Draw from this generator whenever the policy, rather than the network, draws."""
        self._rng = rng

    def initial_state(self, num_envs: int) -> State | None:
        return repeat_state(self._initial, num_envs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the computation, for CPUs."""
        self.stamp()
        if self._exported is None:
            self._exported = self._export()
        spec = WeightsSpec.of(self.weights())
        return ExportedPolicy, (
            self._exported,
            self._mask_shape,
            spec,
            self._reader,
            self._initial,
            _has_doubles(),
        )

    def _restart(self) -> None:
        """Trace again: something that the computation depends on has changed."""
        self._num_restarts += 1
        self._names = self._snapshot.names()
        self._compute = jax.jit(self._snapshot.computation(self._network, self._initial is not None))
        self._exported = None

    def _run(self, obs: Tree, state: State | None, seed: int, masks: Masks) -> Any:
        if self._network.mask is MaskUse.NEEDED and not masks:
            raise needs_mask()
        if state is None:
            state = self.initial_state(count_rows(obs)) or {}
        arrays = self._snapshot.arrays()
        return self._compute(arrays, map_tree(np.array, obs), state, masks, np.uint32(seed))

    def _export(self) -> dict[bool, bytes]:
        if self._shapes is None:
            raise PolicyError("A JaxPolicy can be sent to workers only by ClusterEnv, which shows it observations.")
        (num_rows,) = jax.export.symbolic_shape("n")

        obs = map_tree(lambda row: _shape((num_rows, *row.shape), row.dtype), self._shapes)
        state = {n: _shape((num_rows, *part.shape[1:]), part.dtype) for n, part in (self._initial or {}).items()}
        arrays = [_shape(array.shape, array.dtype) for array in self._snapshot.arrays()]
        ways: dict[bool, Masks] = {} if self._network.mask is MaskUse.NEEDED else {False: {}}
        if self._network.mask is not MaskUse.NONE and self._mask_shape is not None:
            ways[True] = {MASK: _shape((num_rows, *self._mask_shape), np.bool_)}
        try:
            export = jax.export.export(self._compute, platforms=["cpu"])
            return {
                with_mask: bytes(export(arrays, obs, state, masks, _shape((), np.uint32)).serialize())
                for with_mask, masks in ways.items()
            }
        except ImportError as error:
            raise PolicyError(f"{error}: pip install 'clusterenv-rl[jax]', here and where the workers run.") from error
        except Exception as error:
            raise PolicyError(
                f"The network cannot be exported for workers: {error}\nIt must compute for any number of "
                "environments, on the CPU. If it is written for a certain number of rows, write it for one observation "
                "and give jax.vmap(network, in_axes=(None, 0))."
            ) from error


class _Snapshot:
    """The parameters at one moment: arrays, and everything else the computation depends on."""

    def __init__(self, structure: Hashable, treedef: Any, leaves: list[Any]) -> None:
        self._structure, self._treedef, self._leaves = structure, treedef, leaves
        self._is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
        # Writable arrays are compared by value, everything else by identity.
        self._marks = [leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]

    @staticmethod
    def of(network: Network, params: Any) -> _Snapshot:
        structure, tree = network.split(params)
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        return _Snapshot(structure, treedef, leaves)

    def is_alike(self, other: _Snapshot) -> bool:
        """Whether both have the same structure, shapes and plain values."""
        return (
            self._treedef == other._treedef
            and self._structure == other._structure
            and self._is_array == other._is_array
            and all(map(_is_alike, self._leaves, other._leaves, self._is_array))
        )

    def is_same(self, other: _Snapshot) -> bool:
        """Whether both have the same arrays, given that they are alike."""
        pairs = zip(self._marks, other._marks, strict=True)
        return all(one is two or (isinstance(one, bytes) and one == two) for one, two in pairs)

    def names(self) -> list[str]:
        """Name the arrays by their places in the pytree."""
        tree = jax.tree_util.tree_unflatten(self._treedef, list(range(len(self._leaves))))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        return [jax.tree_util.keystr(path) for path, is_array in zip(paths, self._is_array, strict=True) if is_array]

    def arrays(self) -> list[Any]:
        """Return the arrays; those with dtypes that numpy lacks are returned as integers.

        Raises:
            PolicyError: An array was deleted.
        """
        try:
            return [_encode(leaf) for leaf, is_array in zip(self._leaves, self._is_array, strict=True) if is_array]
        except RuntimeError as error:
            if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in self._leaves):
                raise PolicyError(
                    "The policy's parameters were donated to a jitted function (donate_argnums): assign what it "
                    "returned to policy.params."
                ) from error
            raise

    def computation(self, network: Network, has_state: bool) -> Callable[..., Any]:
        """Return the network as a function of such arrays, observations, the recurrent state, masks and a seed."""
        leaves = [
            _Like.of(leaf) if is_array else leaf for leaf, is_array in zip(self._leaves, self._is_array, strict=True)
        ]

        def compute(arrays: list[Any], obs: Any, state: Any, masks: Masks, seed: Any) -> Any:
            given = iter(arrays)
            filled = [leaf.decode(next(given)) if isinstance(leaf, _Like) else leaf for leaf in leaves]
            tree = jax.tree_util.tree_unflatten(self._treedef, filled)
            key = jax.random.key(seed)
            return network.run(self._structure, tree, obs, state if has_state else None, key, masks)

        return compute


class _Like:
    """The dtype, or kind of random key, that an array had before it was encoded."""

    def __init__(self, dtype: Any, implementation: str | None) -> None:
        self._dtype, self._implementation = dtype, implementation

    @staticmethod
    def of(leaf: Any) -> _Like:
        return _Like(leaf.dtype, str(jax.random.key_impl(leaf)) if _is_key(leaf) else None)

    def decode(self, array: Any) -> Any:
        if self._implementation is not None:
            return jax.random.wrap_key_data(array, impl=self._implementation)
        if not _is_known(self._dtype):
            return jax.lax.bitcast_convert_type(array, self._dtype)
        return array


def _encode(leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    if not _is_known(leaf.dtype):
        bits: Any = {1: np.uint8, 2: np.uint16}[leaf.dtype.itemsize]
        return jax.lax.bitcast_convert_type(leaf, bits)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    if leaf.is_deleted():
        raise RuntimeError("deleted")
    return leaf


def _is_alike(one: Any, two: Any, is_array: bool) -> bool:
    if is_array:
        return bool(one.shape == two.shape and one.dtype == two.dtype)
    return one is two or (type(one) is type(two) and bool(one == two))


def _is_key(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _is_known(dtype: Any) -> bool:
    """Whether numpy itself has the dtype."""
    return np.dtype(dtype).kind in "biufc"


def _shape_of_masks(space: Space[Any]) -> tuple[int, ...] | None:
    """Return the shape of an environment's action mask, one value per choice; None if the space cannot be masked."""
    if isinstance(space, Discrete):
        return (int(space.n),)
    if isinstance(space, MultiDiscrete):
        return (int(np.sum(space.nvec)),)
    return space.shape if isinstance(space, MultiBinary) else None


def _has_doubles() -> bool:
    return bool(jax.config.read("jax_enable_x64"))


def _as_state(state: Mapping[str, Any]) -> State:
    return {name: np.array(part) for name, part in state.items()}


def _shape(shape: Sequence[Any], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))


class _JaxArrays(NumpyArrays):
    """Arrays that a function refers to: constants of its computation, which are never written to."""

    def is_array(self, obj: object) -> bool:
        return isinstance(obj, jax.Array)

    def view(self, obj: Any) -> Array:
        return np.asarray(_encode(obj))

    def watch(self, arrays: Sequence[Any]) -> Callable[[], Hashable]:
        return lambda: None
