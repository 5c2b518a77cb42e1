"""Packages: which packages workers have imported, and whose versions differ from the head's or among workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from clusterenv.head.worker import Worker
from clusterenv.wire.compatibility import version_of

log = logging.getLogger(__name__)


class Packages:
    """Compares the versions of packages that environments and policies have imported; logs each difference once."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._told: set[tuple[str, str]] = set()

    def note(self, worker: Worker, packages: Mapping[str, str]) -> None:
        """Note which packages a worker has imported."""
        worker.packages |= packages

    def tell(self) -> None:
        """Log which packages differ, and where, unless that was logged before."""
        differences = []
        for name in dict.fromkeys(name for worker in self._workers for name in worker.packages):
            own = version_of(name)
            places: dict[str, list[Worker]] = {}
            for worker in self._workers:
                if name in worker.packages:
                    places.setdefault(worker.packages[name], []).append(worker)
            if len({own, *places} - {""}) > 1 and any((name, version) not in self._told for version in places):
                self._told.update((name, version) for version in places)
                here = [f"{own} here"] if own else []
                there = [f"{version} on {_describe(workers)}" for version, workers in places.items() if version != own]
                differences.append(f"{name} {', '.join(here + there)}")
        if differences:
            log.warning(
                "workers have imported other versions: %s. Environments may behave differently from worker to worker: "
                "install the same versions everywhere.",
                "; ".join(differences),
            )


def _describe(workers: list[Worker]) -> str:
    """Name workers by their hosts."""
    hosts: dict[str, list[str]] = {}
    for worker in sorted(workers, key=lambda worker: worker.index):
        hosts.setdefault(worker.hostname, []).append(str(worker.index))
    return " and ".join(
        f"{host} (worker{'s' if len(indices) > 1 else ''} {', '.join(indices)})" for host, indices in hosts.items()
    )
