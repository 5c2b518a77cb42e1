"""The tutorial's scripts run, and its page shows them as they are."""

from __future__ import annotations

import difflib
import importlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("torch")
pytest.importorskip("Box2D")

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "examples" / "tutorial"
PAGE = ROOT / "docs" / "tutorials" / "four-steps.md"
NAMES = ["step1", "step2", "step3", "step4"]


def difference(before: str, after: str) -> str:
    """What changes from one script to the next, as the page shows it."""
    old, new = ((SCRIPTS / f"{name}.py").read_text().splitlines(keepends=True) for name in (before, after))
    return "".join(difflib.unified_diff(old, new, f"{before}.py", f"{after}.py", n=1))


def rewritten(page: str) -> str:
    """The page with the diffs that the scripts really have."""

    def renew(found: re.Match[str]) -> str:
        return f"```diff\n{difference(found[1], found[2])}```\n"

    return re.sub(r"^```diff\n--- (\w+)\.py\n\+\+\+ (\w+)\.py\n.*?^```\n", renew, page, flags=re.DOTALL | re.MULTILINE)


def train(name: str, **settings: int) -> list[float]:
    script = importlib.import_module(f"examples.tutorial.{name}")
    returns: list[float] = script.train(script.Args(**settings))
    return returns


def test_the_page_shows_how_each_script_differs_from_the_one_before() -> None:
    page = PAGE.read_text()
    shown = re.findall(r"^```diff\n--- (\w+)\.py\n\+\+\+ (\w+)\.py\n", page, re.MULTILINE)
    assert shown == list(itertools.pairwise(NAMES))
    assert page == rewritten(page), "`python -m tests.test_tutorial` brings the page up to date"


def test_what_the_page_quotes_is_in_the_scripts() -> None:
    quotes = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert quotes
    for quote in quotes:
        assert any(quote in (SCRIPTS / f"{name}.py").read_text() for name in NAMES), quote


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_trains_and_prints_its_speed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    returns = train(name, total_timesteps=8_000, num_envs=16, num_steps=125)
    assert len(returns) > 20, "finished episodes"
    out = capsys.readouterr().out
    assert re.search(r"^8,000 steps in [\d.]+ s: [\d,]+ steps/s, learning included\.$", out, re.MULTILINE)
    assert f"Mean return of the last 100 episodes: {np.mean(returns[-100:]):.1f}." in out


def test_with_the_environments_on_workers_the_plain_loop_learns_exactly_the_same() -> None:
    settings = {"total_timesteps": 4_000, "num_envs": 8, "num_steps": 128}
    assert train("step1", **settings) == train("step2", **settings)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
