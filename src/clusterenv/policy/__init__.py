"""Policies, and when workers pull their weights: numpy only, no sockets, no learning framework."""

import importlib
from typing import TYPE_CHECKING

from clusterenv.policy.distribution import Distribution, divergence
from clusterenv.policy.policy import BasePolicy, Decision, FunctionPolicy, Policy
from clusterenv.policy.sync import AdaptiveSync, EveryUpdate, NeverSync, PeriodicSync, SyncBudget, SyncRule

if TYPE_CHECKING:
    from clusterenv.policy.families import (
        Bernoulli,
        Categorical,
        Custom,
        Deterministic,
        DiagonalGaussian,
        MultiCategorical,
        QValues,
        SquashedGaussian,
    )

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
    "SyncBudget",
    "SyncRule",
    "divergence",
]


def __getattr__(name: str) -> object:
    if name in __all__:  # The families are imported when first used: a plain function needs none.
        return getattr(importlib.import_module("clusterenv.policy.families"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
