"""Recording: writes a worker's rollouts to a piece on its own machine, so that they need not be sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv.errors import ConfigError
from clusterenv.recording.pieces import PieceWriter, check_extras, describe, open_piece
from clusterenv.wire import values
from clusterenv.wire.buffers import RolloutBuffers, RolloutLayout


class ShardRecorder:
    """Writes the rollouts of one shard to the directory that the head names."""

    def __init__(self, start: int) -> None:
        """Write nothing yet.

        Args:
            start: The shard's first environment.
        """
        self._start = start
        self._writer: PieceWriter | None = None
        self._has_written = False
        self._reason = "No recording has begun on this worker."

    def begin(self, directory: str | None, about: bytes, incarnation: int) -> str:
        """End any earlier recording, and begin a piece.

        Args:
            directory: The dataset's directory on this machine; None to stop recording.
            about: The encoded description of the run.
            incarnation: How many processes have joined as this worker; their pieces are ordered by it.

        Returns:
            Why the piece cannot be written, or "" if it can.
        """
        self.close()
        self._reason = ""
        if directory is not None:
            told = {**values.loads(about), "incarnation": incarnation}
            try:
                self._writer = open_piece(Path(directory), f"{told['run']}-{self._start}-{incarnation}", told)
            except ConfigError as error:
                self._reason = str(error)
        return self._reason

    def record(
        self, number: int, layout: RolloutLayout, block: RolloutBuffers, summary: Mapping[str, Any], version: int
    ) -> list[str]:
        """Write a rollout that was made with the newest version.

        Returns:
            The piece's path, and why it could not be written ("" if it was).
        """
        if self._writer is None:
            return ["", self._reason]
        path = str(self._writer.path)
        try:
            check_extras(block.extras)
            self._writer.append(*self._describe(number, layout, block, summary, version))
        except (OSError, ConfigError) as error:
            return [path, f"{path}: {error}."]
        self._has_written = True
        return [path, ""]

    def close(self) -> None:
        """End the recording, if there is one. A piece without a rollout is removed."""
        if self._writer is not None:
            self._writer.close()
            if not self._has_written:
                self._writer.path.unlink(missing_ok=True)
        self._writer, self._has_written = None, False

    def _describe(
        self, number: int, layout: RolloutLayout, block: RolloutBuffers, summary: Mapping[str, Any], version: int
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        positions, finals, episodes = summary["positions"], summary["finals"], summary["episodes"]
        num_envs = block.rewards.shape[1]
        notes = describe(
            number,
            np.arange(self._start, self._start + num_envs),
            lives=positions["life"],
            episodes=positions["episode"],
            steps=positions["step"],
            seeds=positions["seed"],
            versions=np.full(num_envs, version, np.int64),
            ages=np.zeros(num_envs, np.int64),
            divergences=np.zeros(num_envs, np.float64),
            ends=zip(episodes["step"].tolist(), episodes["row"].tolist(), episodes["info"], strict=True),
            final_steps=finals["step"],
            final_columns=finals["row"],
        )
        leaves = zip(layout.observations.leaves, block.observations, strict=True)
        observations = {str(leaf): array for leaf, array in leaves}
        final_obs = zip(layout.observations.leaves, finals["leaves"], strict=False)  # None if no episode ended.
        arrays = {
            "obs": {name: array[:-1] for name, array in observations.items()},
            "next_obs": {name: array[-1] for name, array in observations.items()},
            "final_obs": {str(leaf): np.asarray(part, leaf.dtype) for leaf, part in final_obs},
            "actions": {str(leaf): array for leaf, array in zip(layout.actions.leaves, block.actions, strict=True)},
            "steps": {
                "rewards": block.rewards,
                "terminations": block.terminations,
                "truncations": block.truncations,
                "valid": block.valid,
            },
            "extras": dict(block.extras),
        }
        return notes, arrays
