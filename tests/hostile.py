"""A worker that holds a valid ticket and means harm: a real one underneath, whose answers are tampered with.

Run as a program by `tests/test_hostile_workers.py` in place of `python -m clusterenv.worker`. It plays the tricks named
in `$CLUSTERENV_TRICKS`, one with each answer of the kind the trick is for, and is honest before and after.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, ClassVar

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from clusterenv.wire import messages, shared, values
from clusterenv.wire.compatibility import installed_versions
from clusterenv.wire.info_planes import SlotWriter
from clusterenv.wire.messages import (
    PROTOCOL,
    Adopted,
    Collected,
    Failed,
    Join,
    Part,
    Refused,
    Reply,
    Request,
    Returned,
    Stepped,
)
from clusterenv.worker import __main__, handler, loop
from clusterenv.worker.channel import Channel

TRICKS_VARIABLE = "CLUSTERENV_TRICKS"

pack = msgspec.msgpack.encode


def extension(code: int, tree: Any) -> bytes:
    return pack(Ext(code, pack(tree)))


NONSENSE_VALUES: dict[str, bytes] = {
    "no value": b"\xc1",
    "a pickle": b"\x80\x05\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    "a list": values.dumps([1, 2]),
    "a number as info": values.dumps({"x": 5}),
    "a row too few": values.dumps({"x": np.zeros(1)}),
    "a dict where others have none": values.dumps({"x": {"y": {"z": np.zeros(3)}}}),
    "deep dicts": b"\x81\xa1x" * 100 + b"\x80",
    "deep lists": b"\x91" * 100_000,
    "deep extensions": reduce(lambda inner, _: pack(Ext(1, b"\x91" + inner)), range(2000), b"\xc0"),
    "a list of four billion": b"\xdd\xff\xff\xff\xff",
    "text that is no text": b"\x81\xa1x\xa2\xff\xfe",
    "an unknown extension": extension(99, [1]),
    "an array of pointers": extension(10, ["|O", [1], b"\x00" * 8]),
    "an array of records": extension(10, ["f4,O", [0], b""]),
    "an array of two gigabytes of nothing": extension(10, ["|S0", [1 << 31], b""]),
    "an array of a thousand dimensions": extension(10, ["<f8", [2**62] * 1000, b""]),
    "an array with a negative size": extension(10, ["<f8", [-1], b"\x00" * 8]),
    "an array larger than its bytes": extension(10, ["<f8", [1 << 40], b"\x00" * 8]),
    "objects without items": extension(11, [[1 << 40], []]),
    "a time in units of nothing": extension(10, ["<M8[0s]", [1], b"\x00" * 8]),
    "a Box of four gigabytes": extension(21, ["Box", [0.0, 1.0, [1 << 30], "<f4"], None]),
    "bytes in place of a list": extension(1, b"x" * 1000),
    "a generator beside its buffer": extension(
        13, ["MT19937", {"bit_generator": "MT19937", "state": {"key": [1] * 624, "pos": 1 << 22}}]
    ),
    "an int of a megabyte": pack(Ext(5, b"\x7f" * (1 << 20))),
}

DANGEROUS_TYPES = [
    ("os", "system"),
    ("builtins", "SystemExit"),
    ("builtins", "KeyboardInterrupt"),
    ("builtins", "ExceptionGroup"),
    ("builtins", "eval"),
    ("subprocess", "Popen"),
    ("sys", "modules.os.system"),
    ("", "." * 1000),
    ("\x00", "\ud7ff"),
]


class HostileChannel(Channel):
    """Plays its tricks with what a worker sends."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tricks = os.environ[TRICKS_VARIABLE].split(",")
        self.is_reset = False

    def send(self, reply: Reply, arrays: Iterable[NDArray[Any]] = ()) -> None:
        was_reset, self.is_reset = self.is_reset, self.is_reset or isinstance(reply, Stepped)
        kind, play = TRICKS[self.tricks[0]] if self.tricks else (Join, Channel.send)
        if isinstance(reply, kind) and (was_reset or kind is not Stepped):
            self.tricks.pop(0)
            play(self, reply, list(arrays))
        else:
            super().send(reply, arrays)

    def receive(self, timeout_s: float) -> Request | None:
        while isinstance(request := super().receive(timeout_s), Refused):
            pass  # An honest worker would end.
        return request

    def raw(self, *frames: Any) -> None:
        self._socket.send(list(frames))


Play = Callable[[HostileChannel, Any, list[NDArray[Any]]], None]
TRICKS: dict[str, tuple[Any, Play]] = {"honest": (Stepped, Channel.send)}


def trick(name: str, kind: Any = Stepped) -> Callable[[Play], Play]:
    def enter(play: Play) -> Play:
        TRICKS[name] = kind, play
        return play

    return enter


def _join(index: int, protocol: int = PROTOCOL) -> bytes:
    return messages.encode(Join(protocol, index, 1, "an impostor", installed_versions()))


def _before_the_truth(*others: Callable[[Any, list[Any]], list[Any]]) -> Play:
    """Say other things, and then the truth."""

    def play(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
        for other in others:
            channel.raw(*other(reply, arrays))
        Channel.send(channel, reply, arrays)

    return play


def _with_call(call: Callable[[int], int]) -> Callable[[Any, list[Any]], list[Any]]:
    return lambda reply, arrays: [messages.encode(msgspec.structs.replace(reply, call=call(reply.call))), *arrays]


def _say_twice(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    Channel.send(channel, reply, arrays)
    Channel.send(channel, reply, arrays)


REFUSED: dict[str, Play] = {
    "garbage": _before_the_truth(
        lambda r, a: [b""], lambda r, a: [np.random.default_rng(1).bytes(1000)], lambda r, a: [b"", b"", b""]
    ),
    "answers to old calls": _before_the_truth(
        _with_call(lambda call: call - 1), _with_call(lambda call: call - 2), _with_call(lambda _: 0)
    ),
    "answers to calls to come": _before_the_truth(_with_call(lambda call: call + 1), _with_call(lambda _: 2**63)),
    "negative numbers": _before_the_truth(_with_call(lambda _: -(2**63)), lambda r, a: [b"\x93\x16\xd3\x80"]),
    "arrays of other sizes": _before_the_truth(
        lambda r, a: [messages.encode(r), *a, *a],
        lambda r, a: [messages.encode(r), *a[::-1]],
        lambda r, a: [messages.encode(r), np.zeros(1 << 20), *a[1:]],
        lambda r, a: [messages.encode(r), *[np.zeros(0)] * 10_000],
    ),
    "joins of others": _before_the_truth(*[lambda r, a, i=i: [_join(i)] for i in (0, 1, -1, 2**40, 2**63 - 1)]),
    "joins of other versions": _before_the_truth(lambda r, a: [_join(0, 99)], lambda r, a: [_join(0, -1)]),
    "joins of long names": _before_the_truth(
        lambda r, a: [messages.encode(Join(PROTOCOL, 0, 1, "x" * (1 << 20), {"python": "." * (1 << 20)}))],
        lambda r, a: [messages.encode(Join(PROTOCOL, 0, 1, "x\n2026 root logged in", {}))],
    ),
    "a flood of joins": _before_the_truth(*[lambda r, a: [_join(0)]] * 2000),
    "parts of no rollout": _before_the_truth(
        *[
            lambda r, a, p=p: [messages.encode(Part(r.call, *p)), *a]
            for p in ((0, 1), (-1, 1), (0, 2**62), (2**62, 2**62), (0, 0), (5, -5))
        ]
    ),
    "weights that it was not told to look for": _before_the_truth(
        *[lambda r, a: [messages.encode(messages.Missing(1, 0))]] * 100
    ),
    "the answer twice": _say_twice,
}
for _name, _play in REFUSED.items():
    TRICKS[_name] = Stepped, _play

for _name, _data in NONSENSE_VALUES.items():

    def _infos(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]], data: bytes = _data) -> None:
        Channel.send(channel, Stepped(reply.call, data, None), arrays)

    TRICKS[_name] = Stepped, _infos


@trick("objects nobody has")
def _columns(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    Channel.send(channel, Stepped(reply.call, None, values.dumps([[1], [2], [3]])), arrays)


@trick("another kind of answer")
def _returned(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    channel.raw(messages.encode(Returned(reply.call, values.dumps([]))))


for _place, (_module, _type) in enumerate(DANGEROUS_TYPES):

    def _failed(
        channel: HostileChannel, reply: Any, arrays: Any, module: str = _module, name: str = _type, index: int = _place
    ) -> None:
        channel.raw(messages.encode(Failed(reply.call, (0, -1, 2**62)[index % 3], module, name, "harm", "")))

    TRICKS[f"a dangerous error {_place}"] = Stepped, _failed


@trick("a result too few", Returned)
def _too_few(channel: HostileChannel, reply: Any, arrays: Any) -> None:
    channel.raw(messages.encode(Returned(reply.call, values.dumps([1]))))


@trick("results too many", Returned)
def _too_many(channel: HostileChannel, reply: Any, arrays: Any) -> None:
    channel.raw(messages.encode(Returned(reply.call, values.dumps(list(range(100))))))


@trick("a nonsense mailbox")
def _mailbox(channel: HostileChannel, reply: Any, arrays: Any) -> None:
    channel._mailbox.post(b"\xc1 is no message", reply.call, lambda _: None)  # type: ignore[union-attr]  # it shares memory


class KnownSlots(SlotWriter):
    """Knows where the slots for infos are."""

    slots: ClassVar[NDArray[np.uint64]]

    def __init__(self, slots: NDArray[np.uint64], box: memoryview) -> None:
        super().__init__(slots, box)
        KnownSlots.slots = slots


def _names(data: bytes, generation: int = 1) -> Play:
    """Say that infos lie beside the planes, under these names."""

    def play(channel: HostileChannel, reply: Any, arrays: Any) -> None:
        mailbox: Any = channel._mailbox
        mailbox.names[: len(data)] = data
        mailbox.post_plain(reply.call, generation)

    return play


def _length(size: int) -> bytes:
    return struct.pack("<Q", size)


def _sized(names: bytes) -> bytes:
    return _length(len(names)) + names


NONSENSE_NAMES = {
    "infos without names": _length(0),
    "names that never end": _length(2**63),
    "names that are none": _sized(b"\xc1"),
    "names that are no text": _sized(b"\x92\x91\xa1\xff\x91\xa3<f8"),
    "names without dtypes": _sized(pack([["x"], []])),
    "dtypes without names": _sized(pack([[], ["<f8"]])),
    "an info of pointers": _sized(pack([["x"], ["|O"]])),
    "an info of long text": _sized(pack([["x"], ["<U99"]])),
    "more infos than fit": _sized(pack([["x"] * 33, ["<f8"] * 33])),
}
for _number, (_name, _data) in enumerate(NONSENSE_NAMES.items(), start=1):
    TRICKS[_name] = Stepped, _names(_data, _number)


@trick("bools that are none")
def _bools(channel: HostileChannel, reply: Any, arrays: Any) -> None:
    KnownSlots.slots[:] = 0x0707070707070707
    _names(_sized(pack([["flag"], ["|b1"]])), 99)(channel, reply, arrays)


@trick("infos where no memory is shared")
def _infos_elsewhere(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    Channel.send(channel, Stepped(reply.call, None, None, 7), arrays)


@trick("an overfull mailbox")
def _overfull(channel: HostileChannel, reply: Any, arrays: Any) -> None:
    mailbox: Any = channel._mailbox
    mailbox._words[shared._REPLY_SIZE] = 2**40
    mailbox._words[shared._REPLY_CALL] = reply.call
    mailbox._bell.answer()


@trick("a flood without an answer")
def _flood(channel: HostileChannel, reply: Any, arrays: Any) -> None:
    frame = messages.encode(Stepped(reply.call - 1, None, None))
    while True:
        channel.raw(frame)


@trick("giant extras", Adopted)
def _giant(channel: HostileChannel, reply: Any, arrays: Any) -> None:
    channel.raw(messages.encode(Adopted(reply.call, [messages.ArraySpec("x", "<f8", (1 << 40,))], [])))


def _summary(change: Callable[[dict[str, Any]], None]) -> Play:
    def play(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
        summary = values.loads(reply.summary)
        change(summary)
        Channel.send(channel, msgspec.structs.replace(reply, summary=values.dumps(summary)), arrays)

    return play


def _lengthen(part: str, key: str) -> Callable[[dict[str, Any]], None]:
    def change(summary: dict[str, Any]) -> None:
        summary[part][key] = np.concatenate([summary[part][key], summary[part][key][:1]])

    return change


def _add(part: str, key: str, number: float) -> Callable[[dict[str, Any]], None]:
    def change(summary: dict[str, Any]) -> None:
        summary[part][key] = summary[part][key] + number

    return change


NONSENSE_SUMMARIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "nothing": dict.clear,
    "no positions": lambda summary: summary.pop("positions"),
    "positions of others": _lengthen("positions", "episode"),
    "positions before the start": _add("positions", "step", -1000),
    "no episodes": lambda summary: summary.update(episodes=None),
    "a return too many": _lengthen("episodes", "return"),
    "a length too many": _lengthen("episodes", "length"),
    "lengths that are not whole": _add("episodes", "length", 0.5),
    "infos that are no dicts": lambda summary: summary["episodes"].update(info=[5] * len(summary["episodes"]["info"])),
    "an info too few": lambda summary: summary["episodes"]["info"].pop(),
    "rows of others": _add("episodes", "row", 2),
    "negative rows": _add("episodes", "row", -1000),
    "steps to come": _add("episodes", "step", 10**6),
    "finals of others": _add("finals", "row", -2),
    "a final too many": _lengthen("finals", "step"),
    "leaves of finals gone": lambda summary: summary["finals"]["leaves"].clear(),
    "finals of another shape": lambda summary: summary["finals"].update(leaves=[np.zeros((1, 99))]),
}
for _name, _change in NONSENSE_SUMMARIES.items():
    TRICKS[_name] = Collected, _summary(_change)


@trick("parts out of order", Collected)
def _parts(channel: HostileChannel, reply: Any, arrays: list[NDArray[Any]]) -> None:
    for first, count in ((1, 1), (-1, 1), (0, 2**40), (2**62, 1), (7, 0)):
        channel.raw(messages.encode(Part(reply.call, first, count)), *arrays)
    for first in (-1, 10**6, 2**62):
        channel.raw(messages.encode(msgspec.structs.replace(reply, first=first)), *arrays)
    for version in (-1, 2**63):
        channel.raw(messages.encode(msgspec.structs.replace(reply, version=version)), *arrays)
    Channel.send(channel, reply, arrays)


if __name__ == "__main__":
    vars(loop)["Channel"] = HostileChannel  # Of this process only: the worker's own code does the rest.
    vars(handler)["SlotWriter"] = KnownSlots
    sys.exit(__main__.main())
