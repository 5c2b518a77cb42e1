"""Dataset: writes the episodes of pieces as a Minari dataset; `clusterenv.recording.merging` runs it as a process."""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymnasium.envs.registration import EnvSpec

import clusterenv
from clusterenv.recording.episodes import Episode, EpisodeFinder
from clusterenv.recording.pieces import PROVENANCE, Piece, Record
from clusterenv.wire.layout import Layout

log = logging.getLogger(__name__)


def write(pieces: Sequence[Piece], place: Path, dataset_id: str) -> dict[str, int]:
    """Write all episodes of the pieces to an empty directory, and count them."""
    episodes, num_left_out = _find_episodes(pieces)
    for piece in pieces:
        if piece.lost_bytes:
            log.warning("%s ends with %d bytes of a record that was not finished", piece.path, piece.lost_bytes)
    _write(place, dataset_id, pieces[0].about, episodes)
    return {
        "num_episodes": len(episodes),
        "num_steps": sum(map(len, episodes)),
        "num_cut": sum(episode.cut is not None for episode in episodes),
        "num_left_out": num_left_out,
    }


def _find_episodes(pieces: Sequence[Piece]) -> tuple[list[Episode], int]:
    """Return the episodes of all runs, and how many steps were left out."""
    runs: dict[str, list[Piece]] = {}
    for piece in pieces:
        runs.setdefault(piece.about["run"], []).append(piece)
    found: list[Episode] = []
    num_left_out = 0
    for parts in runs.values():
        finder = EpisodeFinder()
        episodes: list[Episode] = []
        # What a worker wrote of a rollout before it was lost comes before what its replacement wrote.
        parts.sort(key=lambda piece: int(piece.about.get("incarnation", 0)))
        for record in heapq.merge(*(piece.records() for piece in parts), key=_number):
            episodes += finder.add(record)
        episodes += finder.end()
        found += sorted(episodes, key=lambda episode: episode.order)
        num_left_out += finder.num_left_out
    return found, num_left_out


def _number(record: Record) -> int:
    return int(record.notes["number"])


def _write(place: Path, dataset_id: str, about: Mapping[str, Any], episodes: Sequence[Episode]) -> None:
    import minari
    from minari.dataset.minari_storage import MinariStorage
    from minari.serialization import deserialize_space

    spaces = [deserialize_space(about[name]) for name in ("observation_space", "action_space")]
    spec = None if about["env_spec"] is None else EnvSpec.from_json(about["env_spec"])
    # Not as JPEG, which is lossy.
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
    """Yield the episodes in Minari's form, one at a time, so that only one is in memory."""
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
                **{name: episode.steps("extras", name) for name in episode.extras},
                **{name: episode.provenance(noted) for name, noted in PROVENANCE.items()},
            },
        )


def _metadata(episode: Episode) -> dict[str, Any]:
    said = {"cut": episode.cut, "error": episode.error}
    return {"env_index": episode.env_index, **{name: text for name, text in said.items() if text is not None}}


def main() -> None:
    """Write a dataset, given its directory, id and pieces as arguments, and print its counts as JSON."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    place, dataset_id, *paths = sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # If there is no limit, none can be set.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # There is one piece per worker of a run.
    try:
        counts = write([Piece(Path(path)) for path in paths], Path(place), dataset_id)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent process shows it to the user
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # At a normal exit HDF5 would try again to write what could not be written.
    sys.stdout.write(f"\n{json.dumps(counts)}\n")  # On a separate line: imported modules may print, too.


if __name__ == "__main__":
    main()
