"""Outcome: what a finished call brought, apart from the planes it filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The part of an answer that has no fixed size.

    Attributes:
        infos: The infos of all environments, in Gymnasium's vector layout.
        columns: Observation leaves without a fixed size: one list a leaf, one object an environment.
        results: What `invoke` returned, one value an environment.
    """

    infos: dict[str, Any]
    columns: list[list[Any]]
    results: list[Any]
