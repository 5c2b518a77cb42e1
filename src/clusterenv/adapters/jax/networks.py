"""The kinds of JAX networks: how each is called, and which pytree holds its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, Protocol, TypeAlias

import jax

from clusterenv.adapters.jax.exported import MASK
from clusterenv.errors import PolicyError

Masks: TypeAlias = dict[str, Any]  # By the parameter's name; empty if there are none.


class Network(Protocol):
    """One kind of network.

    Attributes:
        mask: How the network takes action masks.
    """

    mask: MaskUse

    def split(self, params: Any) -> tuple[Hashable, Any]:
        """Return what `params` hold besides arrays, and the pytree that holds the arrays."""

    def run(self, structure: Any, tree: Any, obs: Any, state: Any, key: Any, masks: Masks) -> Any:
        """Compute what the network returns for a batch of observations.

        Args:
            structure: What `split` returned, or an equal one.
            tree: The pytree, with other numbers perhaps.
            obs: Of n environments.
            state: The recurrent state; None if there is none.
            key: For what is random in the network.
            masks: Which actions are allowed, if the network is to know.
        """


class MaskUse(Enum):
    """Whether a network has a parameter named `action_mask`."""

    NONE = "none"
    OPTIONAL = "optional"
    NEEDED = "needed"

    @staticmethod
    def of(function: Callable[..., Any]) -> MaskUse:
        try:
            found = inspect.signature(function).parameters.get(MASK)
        except ValueError:  # A builtin without a signature.
            found = None
        if found is None:
            return MaskUse.NONE
        return MaskUse.NEEDED if found.default is found.empty else MaskUse.OPTIONAL


def read_network(given: Any, params: Any) -> tuple[Network, Any]:
    """Find out what kind a network is; return it with its parameters.

    Raises:
        PolicyError: The kind is unknown, or parameters are missing or superfluous.
    """
    origins = {f"{base.__module__}." for base in type(given).__mro__}
    is_nnx = any(origin.startswith("flax.nnx.") for origin in origins)
    if is_nnx or any(origin.startswith("equinox.") for origin in origins):
        if params is not None:
            raise PolicyError(f"A {type(given).__name__} holds its own parameters: leave params out.")
        return (_NnxNetwork(given) if is_nnx else _EquinoxNetwork(given)), given
    if not callable(given):
        raise PolicyError(
            f"JaxPolicy takes a flax or equinox module, or a function of parameters and observations; got {given!r}."
        )
    if params is None:
        raise PolicyError("JaxPolicy needs parameters: JaxPolicy(network, params, output=...).")
    if any(origin.startswith("flax.linen.") for origin in origins):
        return _LinenNetwork(given), params
    return _Function(given), params


class _Function:
    """A function of parameters, observations and, by name, `state` and `key`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_key = _has_parameter(function, "key")
        self.mask = MaskUse.of(function)

    def split(self, params: Any) -> tuple[Hashable, Any]:
        return None, params

    def run(self, structure: Any, tree: Any, obs: Any, state: Any, key: Any, masks: Masks) -> Any:
        named = {} if state is None else {"state": state}
        if self._takes_key:
            named["key"] = key
        return self._function(tree, obs, **named, **masks)


class _LinenNetwork:
    """A flax.linen module, whose parameters the learner holds."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.mask = MaskUse.of(module)

    def split(self, params: Any) -> tuple[Hashable, Any]:
        return None, params

    def run(self, structure: Any, tree: Any, obs: Any, state: Any, key: Any, masks: Masks) -> Any:
        variables = tree if "params" in tree else {"params": tree}
        return self._module.apply(variables, obs, *(() if state is None else (state,)), rngs={"dropout": key}, **masks)


class _NnxNetwork:
    """A flax.nnx module, which keeps its mode, except that batch norms use their running statistics."""

    def __init__(self, module: Any) -> None:
        self.mask = MaskUse.of(module)

    def split(self, params: Any) -> tuple[Hashable, Any]:
        from flax import nnx

        structure, tree = nnx.split(params)
        return structure, tree

    def run(self, structure: Any, tree: Any, obs: Any, state: Any, key: Any, masks: Masks) -> Any:
        from flax import nnx

        def vary(leaf: Any) -> Any:
            """Make each call draw new random numbers, where the learner's own module would advance its count."""
            return jax.random.fold_in(leaf, jax.random.bits(key)) if _is_key(leaf) else leaf

        model = nnx.merge(structure, jax.tree_util.tree_map(vary, tree))
        for _, module in nnx.iter_graph(model):
            if isinstance(module, nnx.BatchNorm):
                module.use_running_average = True
        return model(obs, *(() if state is None else (state,)), **masks)


class _EquinoxNetwork:
    """An equinox module: a function of one observation, as equinox's own layers are."""

    def __init__(self, module: Any) -> None:
        self.mask = MaskUse.of(module)

    def split(self, params: Any) -> tuple[Hashable, Any]:
        return None, params

    def run(self, structure: Any, tree: Any, obs: Any, state: Any, key: Any, masks: Masks) -> Any:
        takes_key = _has_parameter(tree, "key")

        def run_one(obs: Any, state: Any, key: Any, masks: Masks) -> Any:
            return tree(obs, *(() if state is None else (state,)), **({"key": key} if takes_key else {}), **masks)

        num_rows = jax.tree_util.tree_leaves(obs)[0].shape[0]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jax.numpy.arange(num_rows))
        return jax.vmap(run_one)(obs, state, keys, masks)


def _is_key(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # A builtin without a signature.
        return False
