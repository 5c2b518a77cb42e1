"""What is built can be installed where nothing else is, and PyPI can show it."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest

import clusterenv
from tests.test_readme import ROOT, blocks_of

pytest.importorskip("build")
pytest.importorskip("hatchling")
pytest.importorskip("twine")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDRESS = "https://example.org/owner/name"
pytestmark = pytest.mark.xdist_group("package")


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run a command, without this process's own modules unless a path to them is given."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def metadata(dist: Path) -> Message:
    """Return what the wheel says about itself."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_string(archive.read(name).decode())


@pytest.fixture
def hook() -> ModuleType:
    """Return the build's own hook."""
    spec = importlib.util.spec_from_file_location("package_metadata", ROOT / "scripts" / "package_metadata.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_of_the_readme_becomes_absolute_when_there_is_an_address(hook: ModuleType) -> None:
    shown = hook.with_absolute_links((ROOT / "README.md").read_text(), ADDRESS)
    targets = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(targets) > 20
    assert {target for target in targets if not target.startswith("https://")} == set()
    assert "![" in shown
    assert f"{ADDRESS}/raw/main/docs/figures/idea.svg" in shown
    assert set(hook.addresses(ADDRESS)) == {"Repository", "Documentation", "Changelog", "Issues"}


def test_without_an_address_nothing_is_linked_that_leads_nowhere(hook: ModuleType) -> None:
    shown = hook.with_absolute_links((ROOT / "README.md").read_text(), "")
    assert {target for target in re.findall(r"\]\(([^)]+)\)", shown) if "://" not in target} == set()
    assert hook.addresses("") == {}


def test_all_has_every_extra_that_is_for_users() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.findall(r"[\w-]+", everything.partition("[")[2]))
    for_developers = {"all", "bench", "demo", "dev", "docs", "fuzz", "notebook"}
    assert named == set(extras) - for_developers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_metadata_are_complete(metadata: Message) -> None:
    assert metadata["Name"] == "clusterenv-rl"
    assert metadata["Version"] == clusterenv.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    if not PROJECT["tool"]["clusterenv"]["repository"]:
        assert metadata.get_all("Project-URL") is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pypi_can_show_it(dist: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_runs_the_fifteen_lines_where_nothing_else_is(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints, wheel, cwd=tmp_path)
    (tmp_path / "fifteen.py").write_text(blocks_of(ROOT / "README.md")[0])
    assert "(200, 16, 4)" in run(python, "fifteen.py", cwd=tmp_path)
    command = tmp_path / "venv" / "bin" / "clusterenv"
    assert run(command, "--version", cwd=tmp_path).strip() == f"clusterenv {clusterenv.__version__}"
    assert "ok      environment" in run(command, "doctor", "--env", "CartPole-v1", "--num-workers", "1", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tests_run_from_the_sdist(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    tracked = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert [name for name in tracked.splitlines() if not (root / name).exists()] == []
    options = ["-q", "-p", "no:cacheprovider", "-m", "quick", "--basetemp", str(tmp_path / "inner")]
    files = ["tests/test_modes.py", "tests/test_values.py", "tests/test_layout.py", "tests/test_reference_pages.py"]
    paths = [str(root / "src"), str(root), *(path for path in sys.path if "site-packages" in path)]
    shown = run(sys.executable, "-m", "pytest", *options, *files, cwd=root, path=Path(os.pathsep.join(paths)))
    assert " passed" in shown
