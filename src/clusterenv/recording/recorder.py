"""Recorder: takes rollouts and makes a Minari dataset of their episodes, in the background of a run."""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import threading
import time
import uuid
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.env import ClusterEnv
from clusterenv.errors import ConfigError, RecordingError
from clusterenv.recording.dataset import (
    PROVENANCE,
    Recording,
    check_path,
    describe_space,
    describe_spec,
    import_minari,
    merge,
)
from clusterenv.recording.pieces import SUFFIX, PieceWriter, encode
from clusterenv.rollout import Finals, Rollout, map_tree
from clusterenv.wire.layout import Layout

log = logging.getLogger(__name__)

_MAX_WAITING = 4  # Rollouts that wait to be written: so many more than the learner's own are in memory.
_PATIENCE_S = 300.0  # For a disk that takes nothing.

Waiting = queue.Queue[tuple[bytes, bytearray] | None]


class Recorder:
    """Writes rollouts to disk as they are made, and at the end a Minari dataset of whole episodes.

    Episodes go on from one rollout to the next, so give it every rollout, in the order in which they came:

        with Recorder(envs, "datasets/lander/expert-v0") as recorder:
            for rollout in envs.stream(agent, num_steps=128):
                recorder.add(rollout)
                learn(rollout)

    Use it in a `with` block, or call `close`. Until then, what was added is in the directory's `pieces`; after a crash
    `clusterenv merge` makes the dataset of them.

    Attributes:
        path: The dataset's directory.
    """

    def __init__(self, envs: ClusterEnv, path: str | Path) -> None:
        """Begin to record.

        Args:
            envs: Whose rollouts they are.
            path: The dataset's directory, which must not exist or be empty. Its last part is a name as Minari has them:
                `expert-v0`.

        Raises:
            ConfigError: Minari is not installed, or cannot hold these environments' spaces; or the path is not good.
        """
        import_minari()
        if not isinstance(envs, ClusterEnv):
            raise ConfigError(f"Recorder takes the ClusterEnv whose rollouts it will be given, got {type(envs)}.")
        self.path = Path(path).expanduser()
        check_path(self.path)
        run = uuid.uuid4().hex
        about = {
            "run": run,
            "observation_space": describe_space(envs.single_observation_space, "observation"),
            "action_space": describe_space(envs.single_action_space, "action"),
            "env_spec": describe_spec(envs.spec),
        }
        self._layouts = Layout(envs.single_observation_space), Layout(envs.single_action_space)
        self._pieces = self.path / "pieces"
        self._check_free()
        try:
            self._pieces.mkdir(parents=True, exist_ok=True)
            writer = PieceWriter(self._pieces / f"{run}{SUFFIX}", about)
        except OSError as error:
            raise ConfigError(f"Nothing can be recorded to {self.path}: {error}. Choose another path.") from error
        self._num_added = 0
        self._recording: Recording | None = None
        self._writing = _Writing(writer, self.path)
        # Also at the interpreter's end: what waits is then written, and the pieces can be merged.
        self._finalizer = weakref.finalize(self, _leave, self._writing, self.path)

    def add(self, rollout: Rollout) -> None:
        """Record a rollout. What it holds is copied, so that it may be changed at once.

        Returns as soon as it waits to be written; if the disk is slower than the run, waits for the disk.

        Raises:
            RecordingError: An earlier one could not be written, such as to a full disk. Nothing that was written before
                is lost, and the recorder can be closed as usual; the run may go on without it.
        """
        if self._writing.is_closed:
            raise ConfigError("This recorder is closed. Another one needs another path.")
        notes, arrays = self._read(rollout)
        self._writing.put(encode(notes, arrays))
        self._num_added += 1

    def close(self) -> Recording:
        """Write what waits, and make the dataset; again does nothing.

        Episodes that have not ended are marked as truncated, and their metadata has `cut`.

        Returns:
            What the dataset holds.

        Raises:
            RecordingError: The dataset could not be written; the pieces stay, and the error says how to go on.
        """
        if self._recording is None:
            self._finalizer.detach()
            self._writing.close()
            self._recording = recording = merge([self._pieces], self.path)
            shutil.rmtree(self._pieces)
            log.info("recorded %s", recording)
            if self._writing.failure is not None:
                log.warning("%s holds what was recorded before this: %s", self.path, self._writing.failure)
        return self._recording

    def __enter__(self) -> Self:
        """Return the recorder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; an error of the block's own is not hidden by one of the disk's."""
        try:
            self.close()
        except (RecordingError, ConfigError) as failure:
            if error is None:
                raise
            log.warning("%s", failure)

    def _check_free(self) -> None:
        with contextlib.suppress(OSError):  # Whatever is the matter, it is said when the directory is made.
            if (self.path / "data").exists():
                raise ConfigError(
                    f"There is a dataset at {self.path} already, and it is not overwritten. Choose another name or "
                    "version, or delete it."
                )
            if any(self._pieces.glob(f"*{SUFFIX}")):
                raise ConfigError(
                    f"{self.path} holds the pieces of a recording that goes on, or was not closed. If it was not, make "
                    f"its dataset: clusterenv merge {self.path} --out {self.path}. Or choose another path."
                )

    def _read(self, rollout: Rollout) -> tuple[dict[str, Any], dict[str, dict[str, NDArray[Any]]]]:
        """Return what is noted of a rollout, and its arrays."""
        if not isinstance(rollout, Rollout):
            raise ConfigError(f"add() takes rollouts of envs.rollout and envs.stream, got {type(rollout)}.")
        if not isinstance(rollout.rewards, np.ndarray):
            raise ConfigError("This rollout holds tensors: add the one with arrays, before to_torch().")
        if bad := [name for name in rollout.extras if name in PROVENANCE or not name.strip(".") or "/" in name]:
            raise ConfigError(f"The policy's {bad[0]!r} cannot be recorded by that name: give it another.")
        observations, actions = self._layouts
        positions = rollout.positions
        finals = rollout.finals
        if rollout.autoreset_mode is not AutoresetMode.SAME_STEP:  # Else they are the observations that follow.
            none = np.zeros(0, np.int64)
            finals = Finals(map_tree(lambda part: part[none], finals.obs), none, none)
        ends = zip(rollout.episodes.steps.tolist(), rollout.episodes.env_indices.tolist(), strict=True)
        columns = {env_index: column for column, env_index in enumerate(rollout.env_indices.tolist())}
        notes = {
            "number": self._num_added,
            "env_indices": rollout.env_indices,
            "lives": positions.lives,
            "episodes": positions.episodes,
            "steps": positions.steps,
            "seeds": positions.seeds,
            "versions": rollout.versions,
            "ages": rollout.ages,
            "divergences": rollout.divergences,
            "errors": {
                f"{step} {columns[env_index]}": str(info["env_error"])
                for (step, env_index), info in zip(ends, rollout.episodes.infos, strict=True)
                if "env_error" in info
            },
            "final_steps": finals.steps,
            "final_columns": finals.columns,
        }
        arrays = {
            "obs": _leaves(observations, rollout.obs, "observation"),
            "next_obs": _leaves(observations, rollout.next_obs, "observation"),
            "final_obs": _leaves(observations, finals.obs, "observation"),
            "actions": _leaves(actions, rollout.actions, "action"),
            "steps": {
                "rewards": rollout.rewards,
                "terminations": rollout.terminations,
                "truncations": rollout.truncations,
                "valid": rollout.valid,
            },
            "extras": dict(rollout.extras),
        }
        return notes, arrays


class _Writing:
    """A thread that writes records, and the queue before it.

    Attributes:
        failure: What the disk said, if it took something no more.
        is_closed: Whether nothing more comes.
    """

    def __init__(self, writer: PieceWriter, path: Path) -> None:
        self.failure: OSError | None = None
        self.is_closed = False
        self._path = path
        self._waiting: Waiting = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(
            target=self._write_all, args=(writer,), name="clusterenv-recorder", daemon=True
        )
        self._thread.start()

    def put(self, record: tuple[bytes, bytearray] | None) -> None:
        """Let a record wait to be written."""
        if self.failure is not None:
            raise RecordingError(
                f"Nothing more can be recorded to {self._path}: {self.failure}. What was recorded before is there; close "
                "the recorder to have the dataset of it."
            ) from self.failure
        try:
            self._waiting.put(record, timeout=_PATIENCE_S)
        except queue.Full:
            raise RecordingError(f"The disk of {self._path} has taken nothing for {_PATIENCE_S:g} s.") from None

    def close(self) -> None:
        """Write what waits, and end."""
        if self.is_closed:
            return
        self.is_closed = True
        give_up_at = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_PATIENCE_S)
        self._thread.join(max(0.0, give_up_at - time.monotonic()))
        if self._thread.is_alive():
            raise RecordingError(
                f"The disk of {self._path} has not taken what was recorded last within {_PATIENCE_S:g} s. What it took is "
                f"there: clusterenv merge {self._path} --out DIRECTORY."
            )

    def _write_all(self, writer: PieceWriter) -> None:
        with contextlib.closing(writer):
            while (record := self._waiting.get()) is not None:
                if self.failure is not None:
                    continue  # Nobody must wait for a disk that takes nothing.
                try:
                    writer.append(*record)
                except OSError as error:
                    self.failure = error
                    log.warning("nothing more can be recorded to %s: %s", self._path, error)


def _leave(writing: _Writing, path: Path) -> None:
    """End the recording of somebody who did not close it."""
    writing.close()
    log.warning("a recorder was not closed; to have its dataset: clusterenv merge %s --out %s", path, path)


def _leaves(layout: Layout, tree: Any, what: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a tree by their places in it."""
    try:
        parts = layout.flatten(tree)
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"This rollout's {what}s are not those of the recorder's environments.") from error
    named = {}
    for leaf, part in zip(layout.leaves, parts, strict=True):
        if part.dtype != leaf.dtype or part.shape[part.ndim - len(leaf.shape) :] != leaf.shape:
            raise ConfigError(
                f"This rollout's {what}{leaf} is {part.dtype} of shape {part.shape}, and the recorder's environments "
                f"have {leaf.dtype} of shape {leaf.shape}."
            )
        named[str(leaf)] = part
    return named
