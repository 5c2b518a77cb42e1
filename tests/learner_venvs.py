"""Interpreters with learners that do not live beside the other packages: made once, in `.learners`.

Each is a virtual environment over the packages of the tests' own interpreter, so that torch is not installed again;
in it are the learner and whatever else that asks for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REQUIREMENTS = {
    "jax": "jax==0.10.2 flax==0.12.8 equinox==0.13.8 optax==0.2.8 flatbuffers==25.12.19",
    "rllib": "ray[rllib]==2.60.0",
    "tianshou": "tianshou==2.0.1",
    "torchrl": "torchrl==0.14.1",
}
INSTALL_S = 300.0


def interpreter_of(name: str) -> Path:
    """Return the interpreter that has a learner; skips the test if it cannot be installed here."""
    directory = ROOT / ".learners" / name
    requirement = f"{REQUIREMENTS[name]}\n{sys.version}\n"
    marker, python = directory / "installed", directory / "bin" / "python"
    if marker.exists() and marker.read_text() == requirement:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=INSTALL_S)
    (packages,) = directory.glob("lib/python*/site-packages")
    paths = dict.fromkeys(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))
    (packages / "beneath.pth").write_text("\n".join(paths) + "\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", *REQUIREMENTS[name].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0:
        shutil.rmtree(directory)
        pytest.skip(f"{REQUIREMENTS[name]} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    marker.write_text(requirement)
    return python


def run_with(name: str, home: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """Run that interpreter in this project with a home of its own; returns what it prints."""
    variables = {
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",  # Networks this small only suffer from more.
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(home / "torch"),
    }
    done = subprocess.run(
        [interpreter_of(name), *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
