"""From `torch.distributions` to the distributions of `clusterenv.policy`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import distributions as td

from clusterenv.adapters.torch.evaluation import as_array
from clusterenv.errors import PolicyError
from clusterenv.policy.continuous import DiagonalGaussian, SquashedGaussian
from clusterenv.policy.discrete import Bernoulli, Categorical, MultiCategorical
from clusterenv.policy.distribution import Distribution, Floats


def from_torch(given: object) -> Distribution:
    """Read what a user's `distribution` function returned.

    Args:
        given: A torch distribution over n states, a sequence of Categoricals (one for each part of a MultiDiscrete
            action), or one of our own distributions.

    Raises:
        PolicyError: There is no such family here.
    """
    if isinstance(given, Distribution):
        return given
    if isinstance(given, Sequence) and given and all(isinstance(part, td.Categorical) for part in given):
        logits = [_floats(part.logits) for part in given]
        return MultiCategorical(np.concatenate(logits, axis=1), tuple(part.shape[1] for part in logits))
    if isinstance(given, td.Independent):
        return from_torch(given.base_dist)
    if isinstance(given, td.Categorical):
        return Categorical(_floats(given.logits))
    if isinstance(given, td.Bernoulli):
        return Bernoulli(_rows(given.logits))
    if isinstance(given, td.Normal):
        return DiagonalGaussian(_rows(given.loc), _rows(given.scale.log()))
    if isinstance(given, td.TransformedDistribution) and (squashed := _squashed(given)):
        return squashed
    raise PolicyError(
        f"A {type(given).__name__} is no distribution ClusterEnv can compare. Return a Categorical, a list of "
        "Categoricals, a Bernoulli, a Normal, or a Normal under TanhTransform (and AffineTransform); or describe it "
        "yourself with clusterenv.policy.Custom(arrays, compare)."
    )


def _squashed(given: td.TransformedDistribution) -> SquashedGaussian | None:
    base: object = given.base_dist
    transforms = list(given.transforms)
    while isinstance(base, td.Independent):
        base = base.base_dist
    if not isinstance(base, td.Normal) or not transforms or not isinstance(transforms[0], td.TanhTransform):
        return None
    gaussian = SquashedGaussian(_rows(base.loc), _rows(base.scale.log()))
    match transforms[1:]:
        case []:
            return gaussian
        case [td.AffineTransform() as affine]:
            return SquashedGaussian(
                gaussian.mean, gaussian.log_std, scale=_number(affine.scale), shift=_number(affine.loc)
            )
        case _:
            return None


def _floats(tensor: torch.Tensor) -> Floats:
    array: Floats = as_array(tensor).astype(np.float32, copy=False)
    return array


def _rows(tensor: torch.Tensor) -> Floats:
    array = _floats(tensor)
    return array[:, None] if array.ndim == 1 else array


def _number(value: torch.Tensor | float) -> Floats:
    return _floats(value) if isinstance(value, torch.Tensor) else np.asarray(value, np.float32)
