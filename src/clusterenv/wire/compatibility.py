"""Versions that head and worker must agree on so that code can be sent from one to the other."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import gymnasium
import numpy as np

# How many leading numbers of a version must be equal: pickled code depends on Python's minor version, pickled spaces
# on Gymnasium's, and arrays inside them on NumPy's major version.
_PARTS = {"python": 2, "gymnasium": 2, "numpy": 1}


def installed_versions() -> dict[str, str]:
    """Return the versions in this process; for clusterenv itself the protocol's number counts."""
    return {"python": platform.python_version(), "gymnasium": gymnasium.__version__, "numpy": np.__version__}


def find_conflict(head: Mapping[str, str], worker: Mapping[str, str]) -> str:
    """Say what to install on the worker's side so that it works with the head; an empty string if it does already."""
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
