"""Assemble: a block of arrays and the shards' summaries put together as a `Rollout`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.head.outcome import Collection
from clusterenv.rollout import Episodes, Finals, Rollout
from clusterenv.wire.block import Block
from clusterenv.wire.layout import Layout

Shards = Sequence[tuple[int, int]]


def assemble(
    collection: Collection,
    shards: Shards,
    layouts: tuple[Layout, Layout],
    mode: AutoresetMode,
    provenance: Mapping[str, NDArray[Any]],
    stats: dict[str, Any],
    env_indices: NDArray[np.int64] | None = None,
) -> Rollout:
    """Make the rollout.

    Args:
        collection: What the workers made.
        shards: Whose columns each summary speaks of.
        layouts: Of actions and observations.
        mode: How environments were reset.
        provenance: `versions`, `ages` and `divergences`, per environment.
        stats: What it cost.
        env_indices: The environment of each column, if not that of the same number.

    Raises:
        WireError: A worker's summary makes no sense.
    """
    actions, observations = layouts
    block = collection.block
    if env_indices is None:
        env_indices = np.arange(block.rewards.shape[1])
    for summary, (start, stop) in zip(collection.summaries, shards, strict=True):
        try:
            _check_episodes(summary["episodes"], stop - start, len(block.rewards))
            if mode is AutoresetMode.SAME_STEP:
                _check_finals(summary["finals"], block.columns(start, stop), observations)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise WireError(
                f"What the worker of environments {env_indices[start]} to {env_indices[stop - 1]} says of its rollout "
                f"makes no sense: {repr(error)[:300]}."
            ) from error
    episodes = _episodes(collection.summaries, shards, env_indices)
    finals = _finals(collection, shards, observations, mode)
    return Rollout(
        obs=observations.nest([column[:-1] for column in block.observations]),
        actions=actions.nest(block.actions),
        rewards=block.rewards,
        terminations=block.terminations,
        truncations=block.truncations,
        valid=block.valid,
        extras=block.extras,
        next_obs=observations.nest([column[-1] for column in block.observations]),
        states=block.states,
        finals=finals,
        episodes=episodes,
        autoreset_mode=mode,
        stats=stats,
        env_indices=env_indices,
        versions=provenance["versions"],
        ages=provenance["ages"],
        divergences=provenance["divergences"],
    )


def _check_episodes(part: Mapping[str, Any], num_rows: int, num_steps: int) -> None:
    """Check that a shard speaks of its own environments, and says as much of each episode."""
    count = len(_indices(part["row"], num_rows))
    for values in (_indices(part["step"], num_steps), part["return"], part["length"]):
        if values.shape != (count,) or values.dtype.kind not in "if":
            raise ValueError(f"{count} episodes, but {values.dtype}{values.shape}")
    if not isinstance(part["info"], list) or len(part["info"]) != count:
        raise ValueError(f"no list of {count} infos")


def _check_finals(part: Mapping[str, Any], columns: Block, layout: Layout) -> None:
    """Check that a shard has a final observation for each episode that ended in its columns, and no other."""
    row, step = part["row"], part["step"]
    order = np.lexsort((row, step))
    ends = np.nonzero(columns.terminations | columns.truncations)
    if not (np.array_equal(step[order], ends[0]) and np.array_equal(row[order], ends[1])):
        raise ValueError("final observations of other episodes than those that ended")
    if len(row) and len(part["leaves"]) != len(layout.leaves):
        raise ValueError(f"{len(part['leaves'])} leaves, not {len(layout.leaves)}")
    for leaf, values in zip(layout.leaves, part["leaves"], strict=False):
        if values.shape != (len(row), *leaf.shape) or values.dtype.kind not in "biuf":
            raise ValueError(f"final observations{leaf} are {values.dtype}{values.shape}")


def _episodes(summaries: Sequence[Mapping[str, Any]], shards: Shards, env_indices: NDArray[np.int64]) -> Episodes:
    """Put the shards' episodes in order of time, then environment."""
    parts = [summary["episodes"] for summary in summaries]
    rows = np.concatenate([part["row"] + start for part, (start, _) in zip(parts, shards, strict=True)])
    steps = np.concatenate([part["step"] for part in parts])
    order = np.lexsort((rows, steps))
    infos = [info for part in parts for info in part["info"]]
    return Episodes(
        np.concatenate([part["return"] for part in parts]).astype(np.float64)[order],
        np.concatenate([part["length"] for part in parts]).astype(np.int64)[order],
        env_indices[rows[order]],
        steps[order],
        [infos[index] for index in order],
    )


def _finals(collection: Collection, shards: Shards, layout: Layout, mode: AutoresetMode) -> Finals:
    block = collection.block
    steps, envs = np.nonzero(block.terminations | block.truncations)
    if mode is not AutoresetMode.SAME_STEP:
        # The next row still shows the episode's last observation: its reset comes one step later, or never.
        return Finals(layout.nest([column[steps + 1, envs] for column in block.observations]), steps, envs)
    parts = [summary["finals"] for summary in collection.summaries]
    rows = np.concatenate([part["row"] + start for part, (start, _) in zip(parts, shards, strict=True)])
    order = np.lexsort((rows, np.concatenate([part["step"] for part in parts])))
    leaves = []
    for index, leaf in enumerate(layout.leaves):
        stacks = [part["leaves"][index] for part in parts if len(part["row"])]
        column = np.zeros((len(steps), *leaf.shape), leaf.dtype)
        if stacks:
            column[...] = np.concatenate(stacks)[order]
        leaves.append(column)
    return Finals(layout.nest(leaves), steps, envs)


def _indices(values: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    if values.dtype != np.int64 or values.ndim != 1 or (len(values) and not 0 <= values.min() <= values.max() < limit):
        raise ValueError(f"no indices below {limit}")
    return values
