"""Versions: what head and worker must agree on for code to travel from one to the other."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import gymnasium
import numpy as np

# How many of a version's numbers must be equal: pickled code depends on Python's minor version, pickled spaces on
# Gymnasium's, arrays inside them on NumPy's major.
_PARTS = {"python": 2, "gymnasium": 2, "numpy": 1}


def installed_versions() -> dict[str, str]:
    """Return the versions of this process; that of clusterenv itself is the protocol's number."""
    return {"python": platform.python_version(), "gymnasium": gymnasium.__version__, "numpy": np.__version__}


def find_conflict(head: Mapping[str, str], worker: Mapping[str, str]) -> str:
    """Say what must be installed on the worker's side for it to work with the head; nothing if it fits."""
    wrong = [name for name, parts in _PARTS.items() if _cut(head[name], parts) != _cut(worker.get(name, ""), parts)]
    if not wrong:
        return ""
    has = ", ".join(f"{name} {worker.get(name, 'of an unknown version')}" for name in wrong)
    needs = ", ".join(f"{name} {head[name]}" for name in wrong)
    packages = " ".join(f"{name}=={head[name]}" for name in wrong if name != "python")
    remedy = f"pip install {packages}" if "python" not in wrong else f"use Python {_cut(head['python'], 2)} there"
    return f"it has {has}, the head {needs}: {remedy}"


def _cut(text: str, parts: int) -> str:
    return ".".join(text.split(".")[:parts])
