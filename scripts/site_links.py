"""A hook of mkdocs: pages link to each other as files of the repository; on the site, these links lead to pages.

Results of benchmarks and the changelog become pages of the site. Files that do not, such as the examples, are linked in
the repository if it has an address (`tool.clusterenv.repository` in pyproject.toml), and named if not. A link that
leads nowhere is a warning, which a strict build does not forgive.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["clusterenv"]["repository"]
# Files beside docs/ that are part of the site, and where.
BORROWED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "results/index.md",
    "benchmarks/results": "results",
    "experiments/results": "results/experiments",
}
SHOWN = {".md", ".png", ".svg"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)

log = logging.getLogger(f"mkdocs.hooks.{__name__}")


def on_config(config: Any) -> Any:
    """Show the repository's address, if there is one."""
    if REPOSITORY:
        config["repo_url"] = REPOSITORY
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is borrowed."""
    for source in _borrowed_files():
        files.append(File.generated(config, _place_of(source) or "", abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links of the repository links of the site."""
    source = Path(page.file.abs_src_path).relative_to(ROOT)

    def lead(found: re.Match[str]) -> str:
        is_image, text, target, anchor = found.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = Path(os.path.normpath(source.parent / target))
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", source, target)
            return text
        place = _place_of(path)
        if place is None:
            return _outside(text, path)
        if text == path.name:  # "sync.md" is what the page is called in the repository.
            text = _title_of(ROOT / path)
        return f"{is_image}[{text}]({os.path.relpath(place, Path(page.file.src_uri).parent)}{anchor or ''})"

    return "".join(
        part if number % 2 and not part.startswith("`[") else LINK.sub(lead, part)
        for number, part in enumerate(CODE.split(markdown))
    )


def _outside(text: str, path: Path) -> str:
    if not REPOSITORY:
        return text if str(path) in text else f"{text} (`{path}`)"
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"[{text}]({REPOSITORY}/{kind}/main/{path})"


def _borrowed_files() -> list[Path]:
    found = []
    for name in BORROWED:
        inside = [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*"))
        found += [path.relative_to(ROOT) for path in inside if path.suffix in SHOWN]
    return found


def _place_of(path: Path) -> str | None:
    """Return where a file of the repository is on the site, below its root; None if it is not there."""
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    for name, place in BORROWED.items():
        if path == Path(name):
            return place if path.suffix in SHOWN else None
        if path.is_relative_to(name) and path.suffix in SHOWN:
            return (Path(place) / path.relative_to(name)).as_posix()
    return None


def _title_of(page: Path) -> str:
    found = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
    return found[1] if found else page.name
