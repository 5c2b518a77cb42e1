"""Bytes that are nearly right: whatever is changed in them, they are read right or refused."""

from __future__ import annotations

import random
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv.errors import WireError
from clusterenv.wire import messages, values
from clusterenv.wire.infos import check_infos
from clusterenv.wire.messages import PROTOCOL, Join
from tests import fuzz_codecs, hostile
from tests.test_values import VALUES

pytestmark = pytest.mark.quick

CHECKS = {check.__name__.removeprefix("check_"): (check, seeds) for check, seeds in fuzz_codecs.SEEDS}


@pytest.mark.parametrize("name", CHECKS)
def test_valid_bytes_are_read(name: str) -> None:
    check, seeds = CHECKS[name]
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(seed)


@pytest.mark.parametrize("name", CHECKS)
def test_mutations_of_valid_bytes_are_read_right_or_refused(name: str) -> None:
    check, seeds = CHECKS[name]
    source = random.Random(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5000):
            data = fuzz_codecs.mutate(source.choice(seeds), source)
            try:
                check(data)
            except Exception as error:
                raise AssertionError(f"{name}: {data!r}") from error


@given(VALUES.map(values.dumps), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_mutations_of_any_value_are_read_or_refused(data: bytes, source: random.Random) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_codecs.check_value(fuzz_codecs.mutate(data, source))


MESSAGES = st.one_of(
    st.builds(messages.Stepped, st.integers(-(2**63), 2**64 - 1), st.none() | st.binary(), st.none() | st.binary()),
    st.builds(messages.Part, *[st.integers(-(2**63), 2**64 - 1)] * 3),
    st.builds(
        messages.Collected,
        st.integers(0, 100),
        st.binary(),
        st.floats(allow_nan=False),
        st.integers(0, 9),
        st.integers(0, 2**53 - 1),
        st.none() | st.binary(),
    ),
    st.builds(messages.Failed, st.integers(0, 9), st.none() | st.integers(0, 9), *[st.text()] * 4),
)


@given(MESSAGES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_messages_arrive_as_they_were_sent(message: Any) -> None:
    assert messages.decode_reply(messages.encode(message)) == message


@pytest.mark.parametrize("name", hostile.NONSENSE_VALUES)
def test_a_small_message_takes_little_memory(name: str) -> None:
    data = hostile.NONSENSE_VALUES[name]
    tracemalloc.start()
    try:
        with pytest.raises(WireError) if name not in READABLE else warnings.catch_warnings():
            values.loads(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(data) + 4_000_000
    finally:
        tracemalloc.stop()


READABLE = {"a list", "a number as info", "a row too few", "a dict where others have none", "deep dicts"}


@pytest.mark.parametrize(
    ("hostname", "versions"),
    [
        ("x" * 256, {}),
        ("two lines\n", {}),
        ("\x1b[2J", {}),
        ("", {"python": "." * 256}),
        ("", {str(n): "" for n in range(101)}),
    ],
    ids=["long", "two lines", "an escape", "a long version", "many versions"],
)
def test_a_join_with_names_that_are_none_is_refused(hostname: str, versions: dict[str, str]) -> None:
    with pytest.raises(WireError):
        messages.decode_reply(messages.encode(Join(PROTOCOL, 0, 1, hostname, versions)))


def test_a_bool_from_the_wire_is_true_or_false() -> None:
    for read in (hostile.extension(10, ["|b1", [3], b"\x00\x01\x07"]), hostile.extension(12, ["|b1", b"\x07"])):
        found = np.atleast_1d(values.loads(read))
        assert set(found.view(np.uint8).tolist()) <= {0, 1}
        assert found[-1]


def test_text_that_holds_no_characters_is_refused() -> None:
    for order in "<>":
        with pytest.raises(WireError, match="not a character"):
            values.loads(hostile.extension(10, [f"{order}U1", [1], b"\xff\xff\xff\xff"]))


def colliding_keys(kind: str) -> list[Any]:
    """Return distinct keys that all have the same hash."""
    match kind:
        case "integers":
            return [number * (2**61 - 1) for number in range(8, 5008)]
        case "complex numbers":
            return [complex(-1_000_003 * number, number) for number in range(2, 5002)]
        case "tuples":
            # -1 and -2 have the same hash.
            return [tuple(-1 - (number >> bit & 1) for bit in range(13)) for number in range(5000)]
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["integers", "complex numbers", "tuples"])
@pytest.mark.parametrize("container", [dict.fromkeys, set, frozenset])
def test_keys_that_collide_are_refused_before_they_cost_quadratic_time(
    container: Callable[[list[Any]], Any], kind: str
) -> None:
    keys = colliding_keys(kind)
    assert len({hash(key) for key in keys}) == 1
    with pytest.raises(WireError, match="same hash"):
        values.loads(values.dumps(container(keys)))


@pytest.mark.parametrize("kind", ["integers", "complex numbers", "tuples"])
def test_a_map_whose_keys_may_collide_is_refused_if_it_is_large(kind: str) -> None:
    # As no honest worker writes it: a MessagePack map with keys other than text.
    pairs = b"".join(values.dumps(key) + b"\x00" for key in colliding_keys(kind))
    for head in (b"\xdf" + (5000).to_bytes(4, "big"), b"\xde" + (5000).to_bytes(2, "big")):
        for data in (head + pairs, values.dumps([b"before"])[:1] + head + pairs, extension_of(head + pairs)):
            with pytest.raises(WireError, match="5000 entries"):
                values.loads(data)


def extension_of(payload: bytes) -> bytes:
    return b"\xc9" + len(payload).to_bytes(4, "big") + b"\x01" + payload


@pytest.mark.parametrize(
    "value",
    [
        {str(number): number for number in range(10_000)},
        [{str(number): number for number in range(count)} for count in (0, 15, 16, 255, 256, 257)] * 30,
        [None, True, 1, -1, 200, -200, 2**15, -(2**15), 2**31, -(2**31), 2**63, -(2**63), 2**70, 0.5, "", "x" * 31]
        * 500,
        ["x" * size for size in (32, 255, 256, 70_000)] + [b"\xde" * size for size in (0, 1, 255, 256, 70_000)],
        [np.zeros(size, np.uint8) for size in (0, 1, 100, 300, 70_000)] + [[0] * size for size in (15, 16, 70_000)],
    ],
    ids=["a large dict", "dicts", "scalars", "text and bytes", "arrays"],
)
def test_large_values_arrive_as_they_were_sent(value: Any) -> None:
    received = values.loads(values.dumps(value))
    assert len(values.dumps(value)) > 20_000
    assert repr(received) == repr(value)


def test_many_large_keys_that_do_not_collide_are_read() -> None:
    source = random.Random(1)
    expected = {source.getrandbits(200): number for number in range(5000)} | {2.0**n: n for n in range(-1000, 1000)}
    assert values.loads(values.dumps(expected)) == expected
    assert values.loads(values.dumps(set(expected))) == set(expected)


def test_an_info_whose_name_cannot_be_printed_is_refused() -> None:
    with pytest.raises(WireError, match=r"info '\(of datetime64\)'"):
        check_infos({np.ones(1, np.int64).view("M8")[0]: np.zeros(3)}, 2)
