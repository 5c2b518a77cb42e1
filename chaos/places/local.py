"""The head's own machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from chaos.places.place import Place
from clusterenv import Network


@contextlib.contextmanager
def open_local(transport: str, num_workers: int) -> Iterator[Place]:
    """Let workers run on this machine."""
    yield Place({"network": Network(transport=transport)})
