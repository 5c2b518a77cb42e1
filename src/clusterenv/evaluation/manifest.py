"""Manifest: how an evaluation was made, so that its table can be reproduced."""

from __future__ import annotations

import contextlib
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = ("clusterenv", "gymnasium", "numpy")
_FRAMEWORKS = ("torch", "jax", "stable_baselines3")


def describe_here() -> dict[str, object]:
    """Return the versions, the host, and the commit of the working directory if it is in a git repository."""
    import clusterenv

    versions = {"python": platform.python_version(), "clusterenv": clusterenv.__version__}
    for name in (*_PACKAGES, *_FRAMEWORKS):
        if name in sys.modules and name not in versions:
            versions[name] = str(getattr(sys.modules[name], "__version__", None) or _installed(name))
    return {"versions": versions, "commit": find_commit(Path.cwd()), "host": socket.gethostname()}


def find_commit(directory: Path) -> str | None:
    """Return the commit that is checked out in this directory; None if it is not in a repository.

    Reads git's files rather than running git, which may be missing, or wait for a network file system.
    """
    for parent in (directory, *directory.parents):
        git = parent / ".git"
        try:
            if git.is_file():  # In a worktree or a submodule, it says where the rest is.
                git = (parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
            head = (git / "HEAD").read_text().strip()
        except OSError:
            continue
        return _resolve(git, head)
    return None


def _resolve(git: Path, head: str) -> str | None:
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    places = [git]
    with contextlib.suppress(OSError):  # Only a worktree has one.
        places.append((git / (git / "commondir").read_text().strip()).resolve())
    for place in places:
        with contextlib.suppress(OSError):
            return (place / name).read_text().strip()
        with contextlib.suppress(OSError):
            for line in (place / "packed-refs").read_text().splitlines():
                if line.endswith(f" {name}"):
                    return line.split()[0]
    return None


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
