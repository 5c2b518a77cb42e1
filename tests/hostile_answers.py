"""More tricks of a worker that means harm (`tests.hostile`): with fields of answers that a head might believe."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterenv.wire import values
from clusterenv.wire.messages import Collected, Evaluated, Stepped
from clusterenv.worker import __main__, loop
from clusterenv.worker.channel import Channel
from tests import hostile
from tests.hostile import HostileChannel, Play, trick

ERRORS: dict[str, Any] = {
    "a number": 7,
    "a text": "environment 0 raised",
    "a dict": {"0": "x"},
    "numbers": [1, 2, 3],
    "pairs of the wrong kind": [["x", 1], [None, None]],
    "rows of others": [[-2, "a lie"], [10**6, "a lie"]],
    "a flood": [[0, f"x\nWARNING environment 0 raised {number}\n"] for number in range(20_000)],
}
EVALUATIONS: dict[str, tuple[Any, list[int]]] = {
    "a number": (7, []),
    "a number as an episode": ([7], []),
    "an episode of nobody's": ([[10**6, 1.0, 1, True, False, False, b"\x80"]], []),
    "an episode before the first": ([[-1, 1.0, 1, True, False, False, b"\x80"]], []),
    "a text as a return": ([[0, "1.0", 1, True, False, False, b"\x80"]], []),
    "a pickle as an info": ([[0, 1.0, 1, True, False, False, b"\x80\x05\x95"]], []),
    "a list as an info": ([[0, 1.0, 1, True, False, False, b"\x90"]], []),
    "others' episodes given back": ([], [10**6, -1]),
}
PROBES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a number": lambda said: 7,
    "a list": lambda said: [1, 2],
    "nothing": lambda said: {},
    "something more": lambda said: {**said, "more": 1},
    "no rows": lambda said: {**said, "rows": said["rows"][:0]},
    "rows of others": lambda said: {**said, "rows": said["rows"] + np.uint32(10**6)},
    "rows twice": lambda said: {**said, "rows": said["rows"] * np.uint32(0)},
    "rows of another kind": lambda said: {**said, "rows": said["rows"].astype(np.float64)},
    "rows that are none": lambda said: {**said, "rows": "01"},
    "far too many rows": lambda said: {**said, "rows": np.arange(4096, dtype=np.uint32)},
    "another family": lambda said: {**said, "family": "bernoulli"},
    "a family of objects": lambda said: {**said, "family": ["x"]},
    "other arrays": lambda said: {**said, "arrays": {"mean": said["arrays"]["logits"]}},
    "no arrays": lambda said: {**said, "arrays": 3},
    "lists": lambda said: {**said, "arrays": {"logits": [[0.0, 1.0]]}},
    "too few parameters": lambda said: {**said, "arrays": {"logits": said["arrays"]["logits"][1:]}},
    "wide parameters": lambda said: {**said, "arrays": {"logits": np.zeros((len(said["rows"]), 9), np.float32)}},
    "whole numbers": lambda said: {**said, "arrays": {"logits": said["arrays"]["logits"].astype(np.int64)}},
    "NaN": lambda said: {**said, "arrays": {"logits": said["arrays"]["logits"] * np.float32(np.nan)}},
    "infinity": lambda said: {**said, "arrays": {"logits": np.full_like(said["arrays"]["logits"], np.inf)}},
    "states": lambda said: {**said, "states": {"hidden": np.zeros((1, 8))}},
}
DURATIONS = {"NaN": math.nan, "infinite": math.inf, "negative": -1.0}
VERSIONS = {"a version to come": 2**52, "the version after the newest": None}


def change_summary(change: Callable[[dict[str, Any]], None]) -> Play:
    """Send a rollout with another summary."""

    def play(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
        summary = values.loads(reply.summary)
        change(summary)
        Channel.send(channel, msgspec.structs.replace(reply, summary=values.dumps(summary)), arrays)

    return play


for _name, _errors in ERRORS.items():

    def _change(summary: dict[str, Any], errors: Any = _errors) -> None:
        summary["errors"] = errors

    trick(f"errors: {_name}", Collected)(change_summary(_change))

trick("no summary", Collected)(change_summary(dict.clear))


for _name, (_finished, _unstarted) in EVALUATIONS.items():

    def _evaluate(
        channel: HostileChannel, reply: Any, arrays: Any, finished: Any = _finished, unstarted: Any = _unstarted
    ) -> None:
        changed = msgspec.structs.replace(reply, finished=values.dumps(finished), unstarted=unstarted)
        Channel.send(channel, changed, arrays)

    trick(f"evaluation: {_name}", Evaluated)(_evaluate)


@trick("a rollout that begins at its end", Collected)
def _at_the_end(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    Channel.send(channel, msgspec.structs.replace(reply, first=10**6), arrays)


for _name, _version in VERSIONS.items():

    def _play(channel: HostileChannel, reply: Any, arrays: Any, version: int | None = _version) -> None:
        said = reply.version + 1 if version is None else version
        Channel.send(channel, msgspec.structs.replace(reply, version=said), arrays)

    trick(_name, Collected)(_play)


for _name, _busy_s in DURATIONS.items():

    def _last(channel: HostileChannel, reply: Any, arrays: Any, busy_s: float = _busy_s) -> None:
        Channel.send(channel, msgspec.structs.replace(reply, busy_s=busy_s), arrays)

    trick(f"duration: {_name}", Collected)(_last)


for _name, _lie in PROBES.items():

    def _probe(channel: HostileChannel, reply: Any, arrays: Any, lie: Callable[..., Any] = _lie) -> None:
        said = values.dumps(lie(values.loads(reply.probes)))
        Channel.send(channel, msgspec.structs.replace(reply, probes=said), arrays)

    trick(f"probes: {_name}", Collected)(_probe)


@trick("probes: bytes that say nothing", Collected)
def _garble(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    Channel.send(channel, msgspec.structs.replace(reply, probes=b"\xc1\xff"), arrays)


@trick("probes that nobody asked for in a step", Stepped)
@trick("probes that nobody asked for", Collected)
def _volunteer(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    Channel.send(channel, msgspec.structs.replace(reply, probes=values.dumps({})), arrays)


if __name__ == "__main__":
    os.environ.setdefault(hostile.TRICKS_VARIABLE, "")
    vars(loop)["Channel"] = HostileChannel  # Of this process only: the worker's own code does the rest.
    sys.exit(__main__.main())
