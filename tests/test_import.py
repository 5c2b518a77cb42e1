"""Importing the library is cheap and drags in no framework."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_loads_no_framework() -> None:
    loaded = run("import clusterenv, sys; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert not set(loaded) & {"torch", "jax", "ray", "kubernetes", "matplotlib", "envpool", "stable_baselines3"}


def test_import_costs_less_than_50_ms_more_than_gymnasium_does() -> None:
    # gymnasium.vector is loaded by `import gymnasium` already; numpy too.
    code = "import time, gymnasium; start = time.process_time(); import clusterenv; print(time.process_time() - start)"
    # The least of several: what others do on this machine only ever adds.
    assert min(float(run(code)) for _ in range(5)) < 0.050
