"""The Python blocks of the README and the docs run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# These need a cluster, or JAX: tests/test_slurm.py, test_ray.py, test_kubernetes.py and test_jax.py have them.
ELSEWHERE = ("SlurmLauncher", "SSHLauncher", "KubernetesLauncher", "RayLauncher", "ByHandLauncher", "JaxPolicy")


def blocks_of(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}", marks=[] if page.name == "README.md" else pytest.mark.slow)
    for page in PAGES
    for number, block in enumerate(blocks_of(page), 1)
    if not any(name in block for name in ELSEWHERE)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    # What torch's optimisers cache as soon as they are imported, and SB3's log, are not ours to leave behind.
    # One thread, as for all tests: networks this small only suffer from more.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "SB3_LOGDIR": str(tmp_path / "sb3"),
    }
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=110, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
