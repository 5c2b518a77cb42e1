"""Policies, and when workers pull their weights: numpy only, no sockets, no learning framework."""

from clusterenv.policy.continuous import Deterministic, DiagonalGaussian, SquashedGaussian
from clusterenv.policy.discrete import Bernoulli, Categorical, MultiCategorical, QValues
from clusterenv.policy.distribution import Distribution
from clusterenv.policy.divergence import Custom, divergence
from clusterenv.policy.policy import BasePolicy, Decision, FunctionPolicy, Policy
from clusterenv.policy.sync import AdaptiveSync, EveryUpdate, NeverSync, PeriodicSync, SyncRule

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
