"""The site: whatever is searched for is found, and nothing is fetched from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parent.parent


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, strictly."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.xdist_group("site")
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("RecordVideo", "how-to/video.html"),
        ("checkpoint", "how-to/checkpoint.html"),
        ("JAX", "how-to/jax.html"),
        ("Jupyter", "how-to/jupyter.html"),
        ("normalise", "how-to/normalise.html"),
        ("action_mask", "how-to/action-masks.html"),
        ("torchrun", "how-to/multi-gpu.html"),
        ("Windows", "how-to/macos-windows.html"),
        ("max_worker_hours", "how-to/costs.html"),
        ("Stable-Baselines3", "tutorials/sb3.html"),
        ("worker_idle_share", "reference/statistics.html"),
        ("ConcurrentUse", "reference/errors.html"),
    ],
)
def test_a_search_finds_the_page(site: Path, words: str, page: str) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries if words in entry["title"] + entry["text"]}
    assert page in found


@pytest.mark.xdist_group("site")
def test_a_reader_needs_no_other_host(site: Path) -> None:
    fetched = re.compile(r'(?:<(?:script|img|iframe)[^>]*\ssrc=|<link[^>]*\shref=|url\()["\']?(?:https?:)?//[^"\')\s]+')
    outside = {
        str(path.relative_to(site)): found
        for path in site.rglob("*")
        if path.suffix in {".html", ".css"} and (found := fetched.findall(path.read_text()))
    }
    assert outside == {}


@pytest.mark.xdist_group("site")
def test_the_reference_shows_docstrings(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    for text in ("Start the workers and make the environments", "Play a fixed set of whole episodes with the agent"):
        assert text in page


@pytest.mark.slow
def test_dead_links_stop_the_build_and_are_all_named(tmp_path: Path) -> None:
    root = tmp_path / "project"
    shutil.copytree(ROOT / "docs", root / "docs")
    for path in ROOT.iterdir():
        if path.name not in {"docs", "site"} and not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    links = ["[x](how-to/no-page.md)", "[x](../examples/no_file.py)", "[x](how-to/jax.md#no-heading)"]
    page = root / "docs" / "index.md"
    page.write_text("\n\n".join([page.read_text(), *links]))
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    for name in ("no-page.md", "no_file.py", "no-heading"):
        assert name in done.stderr
