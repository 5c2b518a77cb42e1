"""The Python blocks of the README and the docs run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# These need a cluster, or JAX: tests/test_slurm.py, test_ray.py, test_kubernetes.py and test_jax.py have them.
ELSEWHERE = ("SlurmLauncher", "SSHLauncher", "KubernetesLauncher", "RayLauncher", "ByHandLauncher", "JaxPolicy")
# One process for a page: most of a block's time would go into importing torch. Each block is a script of its own in it.
RUN = """
import pathlib, runpy, sys
for block in sorted(pathlib.Path("blocks").iterdir()):
    print("-----", block.stem, flush=True)
    runpy.run_path(str(block), run_name="__main__")
"""


def blocks_of(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def runnable_blocks_of(page: Path) -> list[str]:
    return [block for block in blocks_of(page) if not any(name in block for name in ELSEWHERE)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[] if page.name == "README.md" else pytest.mark.slow)
        for page in PAGES
        if runnable_blocks_of(page)
    ],
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    for number, block in enumerate(runnable_blocks_of(page), 1):
        (blocks / f"block_{number:02}.py").write_text(block)
    # What torch's optimisers cache as soon as they are imported, and SB3's log, are not ours to leave behind.
    # One thread, as for all tests: networks this small only suffer from more.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "SB3_LOGDIR": str(tmp_path / "sb3"),
    }
    result = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=110, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_two_ranks_of_the_page_on_several_gpus_hold_the_same_weights(tmp_path: Path) -> None:
    (block,) = blocks_of(ROOT / "docs" / "how-to" / "multi-gpu.md")
    (tmp_path / "train.py").write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}  # torch leaves files there.
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    sums = dict(re.findall(r"rank (\d) of 2: (\S+)", done.stdout))
    assert set(sums) == {"0", "1"}
    assert sums["0"] == sums["1"]


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
