"""Merging: makes a Minari dataset from pieces, in a separate process."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

from clusterenv.errors import ConfigError, RecordingError
from clusterenv.recording.pieces import SUFFIX, Piece
from clusterenv.wire.layout import Layout

log = logging.getLogger(__name__)

_SAME = ("observation_space", "action_space", "env_spec")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A finished dataset.

    Attributes:
        path: The dataset's directory.
        dataset_id: The id for `minari.load_dataset`.
        num_cut: The number of episodes that had not ended, and are marked as truncated.
        num_left_out: The number of steps left out because their episode's beginning was not recorded.
    """

    path: Path
    dataset_id: str
    num_episodes: int
    num_steps: int
    num_cut: int
    num_left_out: int

    def __str__(self) -> str:
        """Summarise the dataset in a sentence."""
        cut = f", {self.num_cut} of them cut short" if self.num_cut else ""
        left = f"; {self.num_left_out} steps of episodes whose beginning is missing were left out"
        return (
            f"{self.path}: {self.num_episodes} episodes{cut}, {self.num_steps} steps{left if self.num_left_out else ''}"
        )


def merge(pieces: Sequence[Path], out: Path) -> Recording:
    """Make a Minari dataset from all episodes in the pieces; the pieces are kept.

    The episodes of a run are in the order in which they ended, and runs are in the order of their pieces.

    Args:
        pieces: Files, or directories that are searched for them.
        out: The dataset's directory, named as Minari names datasets: `expert-v0`.

    Raises:
        ConfigError: `out` already exists, or is not a valid dataset name.
        RecordingError: A piece cannot be read, or the dataset cannot be written. No partial dataset is left.
    """
    check_installed()
    out = out.expanduser().resolve()  # Minari joins a relative path to itself.
    dataset_id = check_path(out)
    if (out / "data").exists():
        raise ConfigError(f"There is a dataset at {out} already. Choose another name, or delete it.")
    found = _find([path.expanduser().resolve() for path in pieces])
    _check_alike(map(Piece, found))
    partial = out / "data.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # Left by an interrupted merge.
        partial.mkdir(parents=True)
        counts = _write_apart(found, partial, dataset_id)
        os.rename(partial, out / "data")
    except OSError as error:
        places = " ".join(map(str, found))
        raise RecordingError(
            f"The dataset cannot be written to {out}: {error}. Nothing that was recorded is lost; where there is room: "
            f"clusterenv merge {places} --out DIRECTORY."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Recording(path=out, dataset_id=dataset_id, **counts)


def check_installed() -> None:
    """Raise ConfigError if Minari is not installed, or not completely."""
    try:
        import h5py  # noqa: F401 - Minari imports it too late.
        import minari  # noqa: F401
        import PIL  # noqa: F401 - like h5py
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Recording needs Minari with HDF5, but there is no {error.name}: pip install 'clusterenv-rl[minari]'."
        ) from error


def check_path(out: Path) -> str:
    """Return Minari's id for a dataset in this directory.

    Raises:
        ConfigError: The directory's name is not a valid dataset name.
    """
    from minari.dataset.minari_dataset import parse_dataset_id

    place = out.expanduser().resolve()
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets").resolve()
    dataset_id = place.relative_to(root).as_posix() if root in place.parents else place.name
    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{out} cannot be a dataset: its last part must be a name and a version as Minari has them, such as "
            f"{place.name or 'expert'}-v0, of letters, digits, - and _."
        ) from error
    return dataset_id


def describe_space(space: Space[Any], what: str) -> str:
    """Return a space as Minari writes it.

    Raises:
        ConfigError: Minari cannot represent the space.
    """
    from minari.serialization import deserialize_space, serialize_space

    for leaf in Layout(space).leaves:
        if leaf.dtype is None or 0 in leaf.shape:
            kind = "no fixed size" if leaf.dtype is None else "no elements"
            raise ConfigError(f"The {what}{leaf} has {kind}, so that it cannot be recorded: the space is {space}.")
        if bad := [part for part in leaf.path if isinstance(part, str) and (not part.strip(".") or "/" in part)]:
            raise ConfigError(f"The {what}{leaf} cannot be recorded: HDF5 has no {bad[0]!r} among its names.")
    try:
        text = str(serialize_space(space))
        if deserialize_space(text) == space:
            return text
    except (NotImplementedError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"The {what} space {space} cannot be held by Minari: {error}.") from error
    raise ConfigError(f"The {what} space {space} cannot be held by Minari: it would become another one.")


def describe_spec(spec: EnvSpec | None) -> str | None:
    """Return a spec as Minari writes it, or None if it has no such form."""
    if spec is None:
        return None
    try:
        return str(spec.to_json())
    except (TypeError, ValueError):
        log.warning("the spec of %s cannot be written: the dataset will not say which environment it is of", spec.id)
        return None


def _find(places: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        inside = sorted(place.rglob(f"*{SUFFIX}")) if place.is_dir() else [place]
        if not inside:
            raise ConfigError(f"There are no pieces (*{SUFFIX}) in {place}.")
        found += [path for path in inside if path not in found]
    return found


def _check_alike(pieces: Iterator[Piece]) -> None:
    first = next(pieces)
    for piece in pieces:
        for name in _SAME:
            if piece.about[name] != first.about[name]:
                raise ConfigError(
                    f"{piece.path} and {first.path} cannot be merged: they have different {name}s, "
                    f"{piece.about[name]} and {first.about[name]}."
                )


def _write_apart(pieces: Sequence[Path], place: Path, dataset_id: str) -> dict[str, int]:
    """Write the dataset in another process: HDF5 may crash its process when a disk is full.

    Raises:
        OSError: The dataset was not written.
    """
    command = [sys.executable, "-m", "clusterenv.recording.dataset", str(place), dataset_id, *map(str, pieces)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = done.stderr.strip()
    if done.returncode == 0:
        for line in said.splitlines():
            log.warning("%s", line)
        try:
            counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError) as error:
            raise OSError(f"the process that wrote it does not say what, but {done.stdout[-200:]!r}") from error
        return counts
    reasons = re.findall(r"error message = '([^']+)'", said) or said.splitlines()[-1:]
    raise OSError(reasons[0] if reasons else f"the process that wrote it ended with status {done.returncode}")
