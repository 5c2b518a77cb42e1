"""JAX networks as policies, in an interpreter that has JAX, flax and equinox."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.learner_venvs import ROOT, run_with
from tests.test_readme import blocks_of

# One process: the interpreter is made once. The first time, it is installed.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("jax")]


def test_jax_can_be_installed_beside_torch(tmp_path: Path) -> None:
    assert "flax" in run_with("jax", tmp_path, "-c", "import flax, torch; print(flax.__name__)")


@pytest.mark.parametrize("those", ["exported", "not exported"])
def test_jax_networks_keep_the_law_of_policies(those: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # Nearly all the time goes into compiling.
    options = f"-q -p no:cacheprovider -p no:xdist --timeout 300 --basetemp {tmp_path / 'tests'}".split()
    printed = run_with("jax", tmp_path, "-m", "pytest", *options, "tests/jax_law.py", "-k", those, timeout_s=380.0)
    assert " passed" in printed


def test_the_recipe_trains(tmp_path: Path) -> None:
    arguments = ["--total-steps", "4096", "--num-envs", "8", "--num-workers", "1"]
    printed = run_with("jax", tmp_path, "-m", "examples.recipes.jax_ppo", *arguments)
    assert re.search(r"^return [\d.]+ after 4096 steps$", printed, re.MULTILINE)


def test_the_manuals_block_runs(tmp_path: Path) -> None:
    (block,) = [block for block in blocks_of(ROOT / "docs" / "how-to" / "jax.md") if "JaxPolicy" in block]
    script = tmp_path / "block.py"
    script.write_text(block)
    run_with("jax", tmp_path, str(script))
