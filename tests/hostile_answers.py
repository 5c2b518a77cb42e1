"""More tricks of a worker that means harm (`tests.hostile`): with fields of answers that a head might believe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from numpy.typing import NDArray

from clusterenv.wire import values
from clusterenv.wire.messages import Collected, Evaluated
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


if __name__ == "__main__":
    os.environ.setdefault(hostile.TRICKS_VARIABLE, "")
    vars(loop)["Channel"] = HostileChannel  # Of this process only: the worker's own code does the rest.
    sys.exit(__main__.main())
