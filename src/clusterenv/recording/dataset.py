"""Dataset: makes a Minari dataset of the episodes in pieces."""

from __future__ import annotations

import heapq
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

import clusterenv
from clusterenv.errors import ConfigError, RecordingError
from clusterenv.recording.episodes import Episode, EpisodeFinder
from clusterenv.recording.pieces import SUFFIX, Piece, Record
from clusterenv.wire.layout import Layout

log = logging.getLogger(__name__)

PROVENANCE = {"policy_version": "versions", "policy_age": "ages", "policy_divergence": "divergences"}

_SAME = ("observation_space", "action_space", "env_spec")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A dataset that was made.

    Attributes:
        path: Its directory.
        dataset_id: What `minari.load_dataset` calls it.
        num_cut: Episodes that had not ended, and are marked as truncated.
        num_left_out: Steps of episodes whose beginning was not recorded.
    """

    path: Path
    dataset_id: str
    num_episodes: int
    num_steps: int
    num_cut: int
    num_left_out: int

    def __str__(self) -> str:
        """Say it in a sentence."""
        cut = f", {self.num_cut} of them cut short" if self.num_cut else ""
        left = f"; {self.num_left_out} steps of episodes whose beginning is missing were left out"
        return (
            f"{self.path}: {self.num_episodes} episodes{cut}, {self.num_steps} steps{left if self.num_left_out else ''}"
        )


def merge(pieces: Sequence[Path], out: Path) -> Recording:
    """Make a Minari dataset of all episodes in the pieces; the pieces stay.

    Episodes of one run are in the order in which they ended, and runs in the order of their pieces.

    Args:
        pieces: Files, or directories that are searched for them.
        out: The dataset's directory, named as Minari names datasets: `expert-v0`.

    Raises:
        ConfigError: There is something at `out` already, or its name is not a dataset's.
        RecordingError: A piece cannot be read, or the dataset not written. Then there is none.
    """
    minari = import_minari()
    dataset_id = check_path(out)
    if (out / "data").exists():
        raise ConfigError(f"There is a dataset at {out} already. Choose another name, or delete it.")
    found = [Piece(path) for path in _find(pieces)]
    about = _check_alike(found)
    partial = out / "data.partial"
    with _explaining(out, found):
        shutil.rmtree(partial, ignore_errors=True)  # Of a merge that was interrupted.
        partial.mkdir(parents=True)
        try:
            episodes, num_left_out = _find_episodes(found)
            _write(minari, partial, dataset_id, about, episodes)
            os.rename(partial, out / "data")
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    for piece in found:
        if piece.lost_bytes:
            log.warning("%s ends with %d bytes of a record that was not finished", piece.path, piece.lost_bytes)
    return Recording(
        path=out,
        dataset_id=dataset_id,
        num_episodes=len(episodes),
        num_steps=sum(map(len, episodes)),
        num_cut=sum(episode.cut is not None for episode in episodes),
        num_left_out=num_left_out,
    )


def import_minari() -> ModuleType:
    """Return Minari.

    Raises:
        ConfigError: It is not installed, or not completely.
    """
    try:
        import h5py  # noqa: F401 - Minari imports it when it is too late.
        import minari
        import PIL  # noqa: F401 - as h5py
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Recording needs Minari with HDF5, but there is no {error.name}: pip install 'clusterenv[minari]'."
        ) from error
    return cast("ModuleType", minari)


def check_path(out: Path) -> str:
    """Return what Minari calls a dataset in this directory.

    Raises:
        ConfigError: Minari could not.
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
        ConfigError: Minari cannot hold it.
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


def _check_alike(pieces: Sequence[Piece]) -> Mapping[str, Any]:
    if not pieces:
        raise ConfigError("There are no pieces to merge.")
    first = pieces[0]
    for piece in pieces[1:]:
        for name in _SAME:
            if piece.about[name] != first.about[name]:
                raise ConfigError(
                    f"{piece.path} and {first.path} cannot be merged: they have different {name}s, "
                    f"{piece.about[name]} and {first.about[name]}."
                )
    return first.about


@contextmanager
def _explaining(out: Path, pieces: Sequence[Piece]) -> Iterator[None]:
    """Say of a disk's error what was not lost, and what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RecordingError):
            raise
        places = " ".join(sorted({str(piece.path) for piece in pieces}))
        raise RecordingError(
            f"The dataset cannot be written to {out}: {error}. Nothing that was recorded is lost; where there is "
            f"room: clusterenv merge {places} --out DIRECTORY."
        ) from error


def _find_episodes(pieces: Sequence[Piece]) -> tuple[list[Episode], int]:
    """Return the episodes of all runs, and how many steps belong to none that is whole."""
    runs: dict[str, list[Piece]] = {}
    for piece in pieces:
        runs.setdefault(piece.about["run"], []).append(piece)
    found: list[Episode] = []
    num_left_out = 0
    for parts in runs.values():
        finder = EpisodeFinder()
        episodes: list[Episode] = []
        for record in heapq.merge(*(piece.records() for piece in parts), key=_number):
            episodes += finder.add(record)
        episodes += finder.end()
        found += sorted(episodes, key=lambda episode: episode.order)
        num_left_out += finder.num_left_out
    return found, num_left_out


def _number(record: Record) -> int:
    return int(record.notes["number"])


def _write(
    minari: ModuleType, place: Path, dataset_id: str, about: Mapping[str, Any], episodes: Sequence[Episode]
) -> None:
    from minari.dataset.minari_storage import MinariStorage
    from minari.serialization import deserialize_space

    spaces = [deserialize_space(about[name]) for name in ("observation_space", "action_space")]
    spec = None if about["env_spec"] is None else EnvSpec.from_json(about["env_spec"])
    # Not as JPEG: what is learned from must be what was seen.
    storage = MinariStorage.new(place, *spaces, env_spec=spec, data_format="hdf5", jpeg_encoding=False)
    storage.update_metadata(
        {
            "dataset_id": dataset_id,
            "minari_version": minari.__version__,
            "clusterenv_version": clusterenv.__version__,
        }
    )
    storage.update_episodes(_buffers(episodes, *map(Layout, spaces)))
    storage.update_episode_metadata([_metadata(episode) for episode in episodes], range(len(episodes)))


def _buffers(episodes: Iterable[Episode], observations: Layout, actions: Layout) -> Iterator[Any]:
    """Yield the episodes as Minari takes them, one after another: only one is in memory."""
    from minari.data_collector import EpisodeBuffer

    for episode in episodes:
        truncations = episode.steps("steps", "truncations")
        if episode.cut is not None:
            truncations[-1] = True
        yield EpisodeBuffer(
            seed=episode.seed,
            observations=observations.nest([episode.observations(str(leaf)) for leaf in observations.leaves]),
            actions=actions.nest([episode.steps("actions", str(leaf)) for leaf in actions.leaves]),
            rewards=episode.steps("steps", "rewards"),
            terminations=episode.steps("steps", "terminations"),
            truncations=truncations,
            infos={
                **{name: episode.steps("extras", name) for name in episode.parts[0].record.arrays.get("extras", {})},
                **{name: episode.provenance(noted) for name, noted in PROVENANCE.items()},
            },
        )


def _metadata(episode: Episode) -> dict[str, Any]:
    said = {"cut": episode.cut, "error": episode.error}
    return {"env_index": episode.env_index, **{name: text for name, text in said.items() if text is not None}}
