"""JAX networks as policies, in an interpreter that has JAX, flax and equinox."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.learner_venvs import ROOT, run_with
from tests.test_readme import blocks_of

# One process: the interpreter is made once. The first time, it is installed.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000), pytest.mark.xdist_group("jax")]


def test_jax_networks_keep_the_law_of_policies(tmp_path: Path) -> None:
    run_with("jax", tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/jax_law.py", timeout_s=600.0)


def test_the_recipe_trains(tmp_path: Path) -> None:
    arguments = ["--total-steps", "4096", "--num-envs", "8", "--num-workers", "1"]
    printed = run_with("jax", tmp_path, "-m", "examples.recipes.jax_ppo", *arguments)
    assert re.search(r"^return [\d.]+ after 4096 steps$", printed, re.MULTILINE)


def test_the_manuals_block_runs(tmp_path: Path) -> None:
    (block,) = [block for block in blocks_of(ROOT / "docs" / "policies.md") if "JaxPolicy" in block]
    script = tmp_path / "block.py"
    script.write_text(block)
    run_with("jax", tmp_path, str(script))
