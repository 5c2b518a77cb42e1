"""What a reader must know about the machine to judge the numbers, and nothing that identifies it."""

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.interpreters import PEERS, site_packages

PACKAGES = ("clusterenv-rl", "gymnasium", "numpy", "torch", "box2d", "ale-py", "mujoco", "envpool")


def describe_machine(cache: Path, load_before: float, stolen: float) -> list[str]:
    """Describe processor, versions and how undisturbed the run was.

    Args:
        cache: The benchmark's cache directory, for the peers' versions.
        load_before: The load average before the run.
        stolen: The share of CPU time that the hypervisor gave to others during the run.
    """
    cores = len(os.sched_getaffinity(0))
    return [
        f"{time.strftime('%Y-%m-%d')}, {read_model()}, {cores} usable cores, Linux, Python {platform.python_version()}",
        ", ".join([*list_versions(None, PACKAGES), *peer_versions(cache)]),
        f"load average before the run {load_before:.2f}, CPU time stolen by other machines {stolen:.1%}",
    ]


def read_model() -> str:
    """Read the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def read_cpu_times() -> tuple[int, int]:
    """Read the machine's total and stolen CPU time so far, in clock ticks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[7]


def list_versions(path: Path | None, names: Sequence[str]) -> list[str]:
    """List the installed versions of packages, of the running interpreter or of another's package directory."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=[str(path)] if path else sys.path):
        found.setdefault(distribution.metadata["Name"].lower(), distribution.version)
    return [f"{name} {found[name]}" for name in names if name in found]


def peer_versions(cache: Path) -> list[str]:
    """List the versions of the peers with interpreters of their own; some of their packages may be the benchmark's."""
    found: list[str] = []
    for name, peer in PEERS.items():
        venv = cache / "venvs" / name
        if (venv / "lib").exists():
            own = list_versions(site_packages(venv), peer.packages)
            found += [" with ".join(own or list_versions(None, peer.packages))]
    return [versions for versions in found if versions]
