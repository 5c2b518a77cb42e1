"""Policies, and when workers pull their weights: numpy only, no sockets, no learning framework."""

import importlib
from typing import TYPE_CHECKING

from clusterenv.policy.distribution import Distribution
from clusterenv.policy.divergence import Custom, divergence
from clusterenv.policy.policy import BasePolicy, Decision, FunctionPolicy, Policy
from clusterenv.policy.sync import AdaptiveSync, EveryUpdate, NeverSync, PeriodicSync, SyncRule

if TYPE_CHECKING:
    from clusterenv.policy.continuous import Deterministic, DiagonalGaussian, SquashedGaussian
    from clusterenv.policy.discrete import Bernoulli, Categorical, MultiCategorical, QValues

__all__ = [
    "AdaptiveSync",
    "BasePolicy",
    "Bernoulli",
    "Categorical",
    "Custom",
    "Decision",
    "Deterministic",
    "DiagonalGaussian",
    "Distribution",
    "EveryUpdate",
    "FunctionPolicy",
    "MultiCategorical",
    "NeverSync",
    "PeriodicSync",
    "Policy",
    "QValues",
    "SquashedGaussian",
    "SyncRule",
    "divergence",
]

# Imported when they are first used: an agent needs one family of distributions, and a plain function none.
_FAMILIES = {
    "Bernoulli": "discrete",
    "Categorical": "discrete",
    "Deterministic": "continuous",
    "DiagonalGaussian": "continuous",
    "MultiCategorical": "discrete",
    "QValues": "discrete",
    "SquashedGaussian": "continuous",
}


def __getattr__(name: str) -> object:
    if name in _FAMILIES:
        return getattr(importlib.import_module(f"clusterenv.policy.{_FAMILIES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
