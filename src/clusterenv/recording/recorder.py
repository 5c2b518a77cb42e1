"""Recorder: takes the rollouts of a run and makes a Minari dataset from their episodes."""

from __future__ import annotations

import logging
import shutil
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.env import ClusterEnv
from clusterenv.errors import ConfigError, RecordingError
from clusterenv.recording.merging import (
    Recording,
    check_installed,
    check_path,
    describe_space,
    describe_spec,
    merge,
)
from clusterenv.recording.pieces import PieceWriter, check_extras, describe, open_piece
from clusterenv.rollout import Episodes, Finals, Rollout, map_tree
from clusterenv.wire.layout import Layout

log = logging.getLogger(__name__)


class Recorder:
    """Writes rollouts to disk as they are made, and at the end a Minari dataset of whole episodes.

    Episodes continue from one rollout to the next, so give the recorder every rollout, in the order received:

        with Recorder(envs, "datasets/lander/expert-v0") as recorder:
            for rollout in envs.stream(agent, num_steps=128):
                recorder.add(rollout)
                learn(rollout)

    Use it in a `with` block, or call `close`. Until then, the data is in the directory's `pieces`; after a crash,
    `clusterenv merge` makes the dataset from them.

    With `where="worker"`, each worker writes its part of the rollouts of `collect` on its own machine, where it stays:

        with Recorder(envs, "/local/lander/expert-v0", where="worker") as recorder:
            for _ in range(100):
                recorder.collect(agent, num_steps=1000)
        print(recorder.pieces)  # Copy them to one place, then run `clusterenv merge`.

    Attributes:
        path: The dataset's directory.
        pieces: With `where="worker"`, the files that were written, as `host:path`.
    """

    def __init__(self, envs: ClusterEnv, path: str | Path, *, where: Literal["head", "worker"] = "head") -> None:
        """Begin to record.

        Args:
            envs: The ClusterEnv whose rollouts are recorded. It is asked for its environments' spec, which ends a
                stream.
            path: The dataset's directory, which must be empty or not exist. Its last part is a Minari dataset name,
                such as `expert-v0`.
            where: "worker" makes workers write to this directory on their own machines; nothing is written on this one.

        Raises:
            ConfigError: Minari is not installed, or cannot hold these environments' spaces; or the path is not valid.
        """
        check_installed()
        if not isinstance(envs, ClusterEnv):
            raise ConfigError(f"Recorder takes the ClusterEnv whose rollouts it will be given, got {type(envs)}.")
        if where not in ("head", "worker"):
            raise ConfigError(f"where must be 'head' or 'worker', got {where!r}.")
        self.path = Path(path).expanduser().resolve()  # The run may change its directory.
        self.pieces: list[str] = []
        check_path(self.path)
        run = uuid.uuid4().hex
        about = {
            "run": run,
            "observation_space": describe_space(envs.single_observation_space, "observation"),
            "action_space": describe_space(envs.single_action_space, "action"),
            "env_spec": describe_spec(_ask_spec(envs)),
        }
        self._envs = envs
        self._layouts = Layout(envs.single_observation_space), Layout(envs.single_action_space)
        self._num_added = 0
        self._is_closed = False
        self._recording: Recording | None = None
        self._writer: PieceWriter | None = None
        if where == "worker":
            envs._begin_recording(self, str(self.path), about)
            return
        self._writer = open_piece(self.path, run, about)
        self._finalizer = weakref.finalize(self, _leave, self._writer, self.path)

    def add(self, rollout: Rollout) -> None:
        """Record a rollout; the operating system may still be writing it to disk when this returns.

        Raises:
            RecordingError: The rollout cannot be written, for instance because the disk is full. Rollouts added before
                are safe, the recorder can be closed as usual, and later rollouts may be added.
        """
        self._check_open()
        if self._writer is None:
            raise ConfigError(
                "where='worker' records what stays with the workers, recorder.collect(agent, num_steps), and this "
                "rollout is here already: leave where= out to record it."
            )
        notes, arrays = self._read(rollout)
        try:
            self._writer.append(notes, arrays)
        except OSError as error:
            raise RecordingError(
                f"A rollout cannot be recorded to {self.path}: {error}. Those before it are there; close the recorder "
                "to have the dataset of them."
            ) from error
        self._num_added += 1

    def collect(self, agent: Any, num_steps: int, *, values: Mapping[str, Any] | None = None) -> Episodes:
        """Make a rollout and record it, for those who want only the dataset.

        With `where="worker"` the rollout stays with the workers, who make it with the agent's newest weights, whatever
        the sync rule says.

        Args:
            agent: As for `ClusterEnv.rollout`.
            num_steps: The number of steps per environment, T.
            values: Per-call values for the policy.

        Returns:
            The episodes that finished during the rollout.

        Raises:
            RecordingError: The head or a worker cannot write the rollout, for instance because the disk is full; see
                `add`. The other workers' parts are recorded.
            PolicyError: As for `ClusterEnv.rollout`.
            WorkerFailed: As for `ClusterEnv.rollout`.
        """
        self._check_open()
        if self._writer is not None:
            rollout = self._envs.rollout(agent, num_steps, values=values)
            self.add(rollout)
            return rollout.episodes
        # Counted even if this fails: other workers may have recorded their part.
        number, self._num_added = self._num_added, self._num_added + 1
        episodes, pieces, failure = self._envs._record(agent, num_steps, values, number)
        self.pieces += [piece for piece in pieces if piece not in self.pieces]
        if failure is not None:
            raise failure
        return episodes

    def close(self) -> Recording | None:
        """Make the dataset; further calls do nothing.

        Episodes that have not ended are marked as truncated, with `cut` in their metadata. With `where="worker"` only
        the workers' files are completed, and `clusterenv merge` makes the dataset from them.

        Returns:
            What the dataset holds; None with `where="worker"`.

        Raises:
            RecordingError: The dataset could not be written; the pieces are kept, and the error says how to proceed. Or
                the dataset was written, but the pieces cannot be deleted.
        """
        if self._writer is None:
            if not self._is_closed:
                self._envs._end_recording()
                self._is_closed = True
                log.info("recorded to %s", ", ".join(self.pieces))
        elif self._recording is None:
            self._is_closed = True
            self._finalizer.detach()
            self._writer.close()
            pieces = self.path / "pieces"
            self._recording = merge([pieces], self.path)
            try:
                shutil.rmtree(pieces)
            except OSError as error:
                raise RecordingError(
                    f"The dataset at {self.path} is complete, but {pieces} cannot be deleted: {error}. It is not "
                    "needed any more."
                ) from error
            log.info("recorded %s", self._recording)
        return self._recording

    def __enter__(self) -> Self:
        """Return the recorder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the recorder; an error raised in the block is not hidden by a failure to write."""
        try:
            self.close()
        except (RecordingError, ConfigError) as failure:
            if error is None:
                raise
            log.warning("%s", failure)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("This recorder is closed. Another one needs another path.")

    def _read(self, rollout: Rollout) -> tuple[dict[str, Any], dict[str, dict[str, NDArray[Any]]]]:
        """Return a rollout's metadata and its arrays."""
        if not isinstance(rollout, Rollout):
            raise ConfigError(f"add() takes rollouts of envs.rollout and envs.stream, got {type(rollout)}.")
        if not isinstance(rollout.rewards, np.ndarray):
            raise ConfigError("This rollout holds tensors: add the one with arrays, before to_torch().")
        check_extras(rollout.extras)
        if rollout.positions.run != self._envs.run_id:
            raise ConfigError("This rollout is of another ClusterEnv than the recorder's. Give each its own recorder.")
        observations, actions = self._layouts
        positions = rollout.positions
        finals = rollout.finals
        if rollout.autoreset_mode is not AutoresetMode.SAME_STEP:  # Otherwise they are the observations that follow.
            none = np.zeros(0, np.int64)
            finals = Finals(map_tree(lambda part: part[none], finals.obs), none, none)
        ended = rollout.episodes
        notes = describe(
            self._num_added,
            rollout.env_indices,
            lives=positions.lives,
            episodes=positions.episodes,
            steps=positions.steps,
            seeds=positions.seeds,
            versions=rollout.versions,
            ages=rollout.ages,
            divergences=rollout.divergences,
            ends=zip(ended.steps.tolist(), ended.columns.tolist(), ended.infos, strict=True),
            final_steps=finals.steps,
            final_columns=finals.columns,
        )
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


def _ask_spec(envs: ClusterEnv) -> EnvSpec | None:
    """Return the environments' spec as they were made, with arguments and wrappers; None if they differ."""
    first, *others = envs.apply(lambda env: getattr(env, "spec", None), range(envs.num_envs))
    return first if isinstance(first, EnvSpec) and all(other == first for other in others) else None


def _leave(writer: PieceWriter, path: Path) -> None:
    """End a recording whose recorder was not closed."""
    writer.close()
    log.warning("a recorder was not closed; to have its dataset: clusterenv merge %s --out %s", path, path)


def _leaves(layout: Layout, tree: Any, what: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a tree, keyed by their paths."""
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
