"""Bytes that are nearly right: whatever is changed in them, they are read right or refused."""

from __future__ import annotations

import random
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv.errors import WireError
from clusterenv.wire import messages, values
from clusterenv.wire.messages import PROTOCOL, Join
from tests import fuzz_codecs, hostile
from tests.test_values import VALUES

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
    st.builds(messages.Measured, st.integers(0, 100), st.floats(allow_nan=False), st.floats(allow_nan=False)),
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
        with pytest.raises(WireError, match="no character"):
            values.loads(hostile.extension(10, [f"{order}U1", [1], b"\xff\xff\xff\xff"]))
