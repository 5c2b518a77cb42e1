"""What must hold for any bytes at all, whoever sent them.

`tests/test_codecs.py` checks it for a fixed set of mutations, `scripts/fuzz` for as many as there is time for.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from clusterenv.errors import WireError
from clusterenv.wire import messages, values
from clusterenv.wire.infos import ShardInfos, check_infos, merge_infos
from clusterenv.wire.messages import ArraySpec, Offer

CALL = 7
BOARD = messages.BoardAddress(4711, 5, b"t" * 16)
COPY = messages.Copy(BOARD, 1 << 20, b"d" * 32)
REQUESTS: list[messages.Request] = [
    messages.Assign(CALL, b"code"),
    messages.Serve(CALL, b"spaces", Offer("/proc/1/fd/3", b"nonce"), Offer("/proc/1/fd/4", b"nonce"), BOARD),
    messages.Reset(CALL, 1, [1, None], [True, False], None),
    messages.Step(CALL, 0, None),
    messages.Invoke(CALL, "render", b"arguments"),
    messages.SetAttribute(CALL, "name", b"values"),
    messages.Stop(),
    messages.Refused("why"),
    messages.Adopt(CALL, b"code", 1, None, None, COPY),
    messages.Collect(CALL, 16, 64, 3, b"values", Offer("/proc/1/fd/5", b"nonce"), is_own=True),
    messages.Decide(CALL, 1, None, b"values", 64),
    messages.Load(7, COPY),
    messages.Ping(),
    messages.Resume(CALL, 1, [3, 4], b"seen", [False, True]),
    messages.Cancel(CALL),
    messages.Evaluate(CALL, b"code", 4, [messages.Episode(3, 10**12, None), messages.Episode(4, 0, b"options")], 0.2),
]
REPLIES: list[messages.Reply] = [
    messages.Register(messages.PROTOCOL, 0, "k" * 40),
    messages.Join(messages.PROTOCOL, 0, 4711, "host", {"python": "3.11.2"}, "boot 0 pid:[1] net:[2]", BOARD),
    messages.Ready(CALL, shares_memory=True),
    messages.Missing(7, 6),
    messages.Stepped(CALL, values.dumps({"x": np.zeros(2)}), None),
    messages.Returned(CALL, values.dumps([1, "two"])),
    messages.Failed(CALL, 3, "builtins", "ValueError", "text", "traceback"),
    messages.Adopted(CALL, [ArraySpec("logprob", "<f4", ())], [ArraySpec("hidden", "<f4", (8,))]),
    messages.Collected(CALL, values.dumps({}), 0.1, 0, 3, values.dumps({"rows": np.zeros(2, np.uint32)})),
    messages.Part(CALL, 0, 16),
    messages.Made(CALL, values.dumps({"render_mode": None})),
    messages.Progress(CALL),
    messages.Evaluated(CALL, values.dumps([[3, 21.0, 21, True, False, False, values.dumps({})]]), [4]),
]
VALUES: list[Any] = [
    {"count": 1, "name": "naïve", "nested": {"x": (1, 2.5, None, True)}, "bytes": b"\x00\xff"},
    [2**70, -(2**70), 1 + 2j, "\ud800", {1, 2}, frozenset({"a"}), {3: 4, (5, 6): 7}],
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(["ab", "é"]),
    np.array([b"x", b"yz"]),
    np.array([True, False]),
    np.array(["2026-01-01"], "M8[D]"),
    np.array([1, "two", None], dtype=object),
    [np.float64(1.5), np.bool_(True), np.str_("s"), np.datetime64("NaT")],
    [np.random.Generator(kind(1)) for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)],
    spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])),
    spaces.OneOf([spaces.Text(3), spaces.Sequence(spaces.MultiDiscrete([2, 3]))]),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3), seed=1).sample(num_nodes=2, num_edges=1),
    gym.spec("CartPole-v1"),
    values.RemoteObject("module.Type", "text"),
]
HONEST = {"x": np.array([1.0, 2.0]), "_x": np.array([True, False]), "nested": {"y": np.array([3, 4])}}
HOSTILE = {"x": np.array([5.0, 6.0]), "z": np.array(["a", None], dtype=object), "nested": {"y": np.array([7, 8])}}


def check_request(data: bytes) -> None:
    """Any bytes are a request that encodes to what decodes to it, or refused."""
    _check_message(data, messages.decode_request)


def check_reply(data: bytes) -> None:
    """Any bytes are a reply that encodes to what decodes to it, or refused."""
    _check_message(data, messages.decode_reply)


def _check_message(data: bytes, decode: Callable[[bytes], Any]) -> None:
    try:
        message = decode(data)
    except WireError:
        return
    encoded = messages.encode(message)
    assert messages.encode(decode(encoded)) == encoded


def check_value(data: bytes) -> None:
    """Any bytes are a value that can be used and sent on, or refused."""
    try:
        value = values.loads(data)
    except WireError:
        return
    for generator in value if isinstance(value, list) else [value]:
        if isinstance(generator, np.random.Generator):
            generator.integers(10, size=1000)
    try:
        encoded = values.dumps(value)
    except WireError:
        return  # Nested more deeply than can be sent.
    try:
        values.loads(encoded)
    except WireError as error:
        if not isinstance(error.__cause__, RecursionError):  # Or than can be read: how deep depends on who calls.
            raise


def check_infos_of_others(data: bytes) -> None:
    """Whatever infos one worker sends, the rows of another are its own, or there is an error."""
    try:
        infos = values.loads(data)
        check_infos(infos, 2)
        merged = merge_infos([ShardInfos(0, 2, HONEST), ShardInfos(2, 4, infos)], 4)
    except WireError:
        return
    assert merged["x"][:2].tolist() == [1.0, 2.0]
    assert [bool(flag) for flag in merged["_x"][:2]] == [True, False]
    assert [int(number) for number in merged["nested"]["y"][:2]] == [3, 4]


SEEDS: list[tuple[Callable[[bytes], None], list[bytes]]] = [
    (check_request, [messages.encode(request) for request in REQUESTS]),
    (check_reply, [messages.encode(reply) for reply in REPLIES]),
    (check_value, [values.dumps(value) for value in VALUES]),
    (check_infos_of_others, [values.dumps(HOSTILE)]),
]


def check(data: bytes) -> None:
    """Check what the first byte chooses with the bytes after it."""
    if data:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SEEDS[data[0] % len(SEEDS)][0](data[1:])


_PATCHES = [
    *[bytes([byte]) for byte in (0x00, 0x7F, 0x80, 0x90, 0x91, 0xA0, 0xC0, 0xC1, 0xC2, 0xC3, 0xFF)],
    *[
        bytes([head]) + b"\xff" * size
        for head, size in ((0xCF, 8), (0xD3, 8), (0xDD, 4), (0xDF, 4), (0xC6, 4), (0xDB, 4))
    ],
    *[bytes([0xC7, 3, code]) + b"\x92\x01\x02" for code in range(24)],
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    *[text.encode() for text in ("<f8", "|O8", "|S0", "<M8[0s]", "<U9", "|b1", "f4,f4", "Box", "MT19937", "pos")],
]


def mutate(data: bytes, source: random.Random) -> bytes:
    """Change valid bytes a little: what is nearly right comes further than noise."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 4)):
        start = source.randrange(len(changed) + 1)
        stop = min(len(changed), start + source.choice((0, 1, 1, 2, 4, 8)))
        patch = source.choice(
            (b"", source.randbytes(stop - start), source.choice(_PATCHES), bytes(changed[start:stop]) * 2)
        )
        changed[start:stop] = patch
    return bytes(changed)
