"""A hook of the build: the README as PyPI shows it, and the project's addresses.

On PyPI a relative link leads nowhere. Links become absolute if the repository has an address, and plain text if not.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


class PackageMetadata(MetadataHookInterface):
    """Fills in what `pyproject.toml` calls dynamic, but for the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set readme and urls."""
        root = Path(self.root)
        repository = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["clusterenv"]["repository"]
        text = with_absolute_links((root / "README.md").read_text(), repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(repository)


def addresses(repository: str) -> dict[str, str]:
    """Return what PyPI shows beside the project."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_absolute_links(text: str, repository: str) -> str:
    """Return the text without relative links; pictures without an address are left out."""

    def lead(found: re.Match[str]) -> str:
        is_image, label, target = found.groups()
        if not repository:
            return "" if is_image else label
        return f"{is_image}[{label}]({repository}/{'raw' if is_image else 'blob'}/main/{target})"

    return LINK.sub(lead, text)
