"""JAX networks (flax, equinox, plain functions) as policies: `JaxPolicy`.

Workers import only `exported`, which configures JAX before importing it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterenv.adapters.jax.policy import JaxPolicy

__all__ = ["JaxPolicy"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("clusterenv.adapters.jax.policy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
