"""Interpreters for the peers that cannot live beside the others: made once, in the benchmark's cache directory.

Each is a virtual environment laid over the benchmark's own packages, so that every contender steps the very same build
of Gymnasium, numpy and Box2D, and only the peer itself is installed into it, without the versions it would pin.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALL_TIMEOUT_S = 1200.0
PUFFERLIB = "pufferlib==3.0.0"
TORCHRL = "torchrl==0.14.1"
RLLIB = "ray[rllib]==2.60.0"


class PeerUnavailable(Exception):
    """A peer could not be installed; the text says why, for the table."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One peer's installation.

    Args:
        install: Puts it into the virtual environment at the given path.
        check: An import that works when, and only when, it is usable.
        packages: The names of the packages whose versions a reader wants to know.
    """

    install: Callable[[Path], None]
    check: str
    packages: Sequence[str]


def find_python(name: str, cache: Path) -> Path:
    """Return the interpreter that has a peer.

    Raises:
        PeerUnavailable: It is not installed; `install_peer` does that.
    """
    venv = cache / "venvs" / name
    marker = venv / "installed"
    if not marker.exists():
        raise PeerUnavailable("the installation did not finish")
    if (text := marker.read_text()) != "ok":
        raise PeerUnavailable(text)
    return venv / "bin" / "python"


def install_peer(name: str, cache: Path) -> None:
    """Make a peer's virtual environment unless it is there; if it cannot be made, `find_python` will say why.

    Only success is kept: a failed installation is tried again in the next run.
    """
    venv = cache / "venvs" / name
    marker = venv / "installed"
    if marker.exists() and marker.read_text() == "ok" and check(venv, PEERS[name].check):
        return
    shutil.rmtree(venv, ignore_errors=True)
    try:
        run([sys.executable, "-m", "venv", venv])
        lay_over_own_packages(venv)
        PEERS[name].install(venv)
        problem = check_output(venv, PEERS[name].check)
    except PeerUnavailable as error:
        problem = str(error)
    venv.mkdir(parents=True, exist_ok=True)
    marker.write_text(problem or "ok")


def install_sb3(venv: Path) -> None:
    """Install Stable-Baselines3, and torch if the benchmark's own interpreter has none to lend."""
    pip(venv, "install", "--no-deps", "stable-baselines3")
    pip(venv, "install", "cloudpickle", *(() if importlib.util.find_spec("torch") else ("torch",)))


def install_pufferlib(venv: Path) -> None:
    """Install PufferLib's Python code.

    What we measure of it is pure Python, but its `setup.py` wants to download and compile games first. So the source is
    unpacked and copied, which is what building it without its games and trainer amounts to.
    """
    pip(venv, "install", "--no-deps", "gym==0.23.1", "gym_notices", "psutil")
    pip(venv, "install", "cloudpickle", "setuptools", "wheel")
    source = fetch_source(venv, PUFFERLIB)
    shutil.copytree(
        source / "pufferlib", site_packages(venv) / "pufferlib", ignore=shutil.ignore_patterns("resources", "ocean")
    )
    shutil.rmtree(venv / "source")


def install_torchrl(venv: Path) -> None:
    """Install TorchRL with what it needs beside torch."""
    pip(venv, "install", TORCHRL)


def install_rllib(venv: Path) -> None:
    """Install RLlib with what it needs, and that is another Gymnasium: the one it pins hides the benchmark's own."""
    pip(venv, "install", RLLIB)


PEERS: Mapping[str, Peer] = {
    "sb3": Peer(
        install=install_sb3,
        check="from stable_baselines3.common.vec_env import SubprocVecEnv",
        packages=("stable_baselines3",),
    ),
    "pufferlib": Peer(
        install=install_pufferlib, check="import pufferlib.vector, pufferlib.emulation", packages=("pufferlib",)
    ),
    "torchrl": Peer(
        install=install_torchrl, check="import torchrl.collectors, torchrl.envs", packages=("torchrl", "tensordict")
    ),
    "rllib": Peer(install=install_rllib, check="import ray.rllib.algorithms.ppo", packages=("ray", "gymnasium")),
}


def fetch_source(venv: Path, requirement: str) -> Path:
    """Download a source distribution and return where it is unpacked.

    pip insists on asking a source distribution for its metadata, which fails when `setup.py` does. Then the unpacked
    source is still where pip left it, because it was told not to clean up.
    """
    scratch = venv / "source"
    scratch.mkdir()
    arguments = (
        "download",
        "--no-clean",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
        "-d",
        str(scratch),
    )
    try:
        pip(venv, *arguments, requirement, TMPDIR=str(scratch), NO_OCEAN="1", NO_TRAIN="1")
    except PeerUnavailable as error:
        found = sorted(scratch.glob("*/*/setup.py"))
        if not found:
            raise PeerUnavailable(f"its source could not be downloaded ({error})") from error
        return found[0].parent
    archive = next(scratch.glob("*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(scratch / "unpacked", filter="data")
    return next((scratch / "unpacked").glob("*/setup.py")).parent


def lay_over_own_packages(venv: Path) -> None:
    """Let a virtual environment see the packages of the interpreter that runs the benchmark, behind its own."""
    paths = dict.fromkeys(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))
    (site_packages(venv) / "benchmark-packages.pth").write_text("\n".join(paths) + "\n")


def site_packages(venv: Path) -> Path:
    """Return where a virtual environment keeps its packages."""
    return next((venv / "lib").glob("python*/site-packages"))


def pip(venv: Path, *arguments: str, **variables: str) -> None:
    """Run pip in a virtual environment, whose own programs come first on its PATH."""
    path = os.pathsep.join([str((venv / "bin").resolve()), os.environ.get("PATH", "")])
    run([venv / "bin" / "python", "-m", "pip", "--quiet", *arguments], PATH=path, **variables)


def check(venv: Path, statement: str) -> bool:
    """Whether an import works in a virtual environment."""
    return check_output(venv, statement) is None


def check_output(venv: Path, statement: str) -> str | None:
    """Try an import in a virtual environment; returns what is wrong, or None."""
    try:
        # Isolated from the working directory's packages, and from what an import may drop into it (PufferLib does).
        run([venv / "bin" / "python", "-c", f"import os; os.chdir({str(venv)!r}); {statement}"])
    except PeerUnavailable as error:
        return str(error)
    return None


def run(command: Sequence[str | Path], **variables: str) -> None:
    """Run a command to its end.

    Raises:
        PeerUnavailable: It failed; the text is the last line of what it said.
    """
    try:
        subprocess.run(
            [os.path.abspath(command[0]), *command[1:]],
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or error.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        raise PeerUnavailable((errors or lines or [f"exit status {error.returncode}"])[-1].strip()[:200]) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{type(error).__name__}: {error}"[:200]) from error
