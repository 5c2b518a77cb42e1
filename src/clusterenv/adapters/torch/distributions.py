"""Torch's distributions as ours: which family, and which tensors are its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributions as td

from clusterenv.adapters.torch.module import as_floats
from clusterenv.adapters.torch.trace import Sheet
from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Distribution
from clusterenv.policy.program import make_distribution


def read(sheet: Sheet) -> Distribution:
    """Return a sheet's distribution, in numpy."""
    parameters = {name: as_floats(tensor) for name, tensor in sheet.parameters.items()}
    constants = {
        name: as_floats(value) if isinstance(value, torch.Tensor) else np.asarray(value, np.float32)
        for name, value in sheet.constants.items()
    }
    return make_distribution(sheet.family, parameters, constants, sheet.nvec)


def draw_again(sheet: Sheet) -> torch.Tensor:
    """Draw from a sheet's distribution, as torch's own distributions do, and in the same order."""
    parameters = sheet.parameters
    match sheet.family:
        case "categorical":
            return _draw_categorical(parameters["logits"])
        case "multi_categorical":
            whole = parameters.get("logits")
            parts = list(parameters.values()) if whole is None else torch.split(whole, list(sheet.nvec), dim=-1)
            return torch.stack([_draw_categorical(part) for part in parts], dim=1)
        case "bernoulli":
            return torch.bernoulli(torch.sigmoid(parameters["logits"]))
    mean = parameters["mean"]
    std = parameters["std"] if "std" in parameters else parameters["log_std"].exp()
    drawn = torch.normal(mean, std.expand_as(mean))
    if sheet.family == "squashed_gaussian":
        drawn = torch.tanh(drawn) * sheet.constants["scale"] + sheet.constants["shift"]
    return drawn


def _draw_categorical(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax(logits, dim=-1), 1, replacement=True)[:, 0]


def from_torch(given: object) -> Distribution:
    """Read what a user's `distribution` returned: a torch distribution, a list of Categoricals, or one of our own."""
    return given if isinstance(given, Distribution) else read(describe(given))


def describe(given: Any) -> Sheet:
    """Describe a distribution over n states.

    Args:
        given: A torch distribution, or a sequence of Categoricals, one for each part of a MultiDiscrete action.

    Raises:
        PolicyError: The distribution is of a family that cannot be compared.
    """
    if isinstance(given, Sequence) and given and all(isinstance(part, td.Categorical) for part in given):
        logits = {f"logits.{index}": part.logits for index, part in enumerate(given)}
        return Sheet("multi_categorical", logits, {}, {}, tuple(part.shape[-1] for part in logits.values()))
    if isinstance(given, td.Independent):
        return describe(given.base_dist)
    if isinstance(given, td.Categorical):
        return Sheet("categorical", {"logits": given.logits}, {}, {})
    if isinstance(given, td.Bernoulli):
        return Sheet("bernoulli", {"logits": given.logits}, {}, {})
    if isinstance(given, td.Normal):
        return Sheet("diagonal_gaussian", {"mean": given.loc, "std": given.scale}, {}, {})
    if isinstance(given, td.TransformedDistribution) and (squashed := _describe_squashed(given)):
        return squashed
    raise PolicyError(
        f"ClusterEnv cannot compare distributions of type {type(given).__name__}. Return a Categorical, a list of "
        "Categoricals, a Bernoulli, a Normal, or a Normal under TanhTransform (and AffineTransform); or describe it "
        "yourself with clusterenv.policy.Custom(arrays, compare)."
    )


def squash(normal: td.Normal, scale: Any, shift: Any) -> Sheet:
    """Describe a Normal whose samples go through tanh, are scaled and shifted."""
    constants = {"scale": scale, "shift": shift}
    return Sheet("squashed_gaussian", {"mean": normal.loc, "std": normal.scale}, constants, {})


def _describe_squashed(given: td.TransformedDistribution) -> Sheet | None:
    base: object = given.base_dist
    while isinstance(base, td.Independent):
        base = base.base_dist
    transforms = list(given.transforms)
    while len(transforms) == 1 and isinstance(transforms[0], td.ComposeTransform):
        transforms = list(transforms[0].parts)
    transforms = [part.base_transform if isinstance(part, td.IndependentTransform) else part for part in transforms]
    if not isinstance(base, td.Normal) or not transforms or not isinstance(transforms[0], td.TanhTransform):
        return None
    match transforms[1:]:
        case []:
            return squash(base, 1.0, 0.0)
        case [td.AffineTransform() as affine]:
            return squash(base, affine.scale, affine.loc)
        case _:
            return None


@contextmanager
def captured() -> Iterator[list[td.Distribution]]:
    """Collect every torch distribution that is made in the block, in order."""
    made: list[td.Distribution] = []
    original: Callable[..., None] = td.Distribution.__init__

    def note(self: td.Distribution, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)

    td.Distribution.__init__ = note  # type: ignore[method-assign]  # put back below
    try:
        yield made
    finally:
        td.Distribution.__init__ = original  # type: ignore[method-assign]  # as it was
