"""docs/reference/protocol.md says what the code does: messages, fields, sizes, offsets and examples are compared."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from clusterenv.wire import messages, shared, values
from clusterenv.wire.ticket import Ticket

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "protocol.md").read_text()
EXAMPLE = re.compile(r"^ {4}(\S.*?) {2,}((?:[0-9a-f]{2} ?)+)$", re.MULTILINE)
NUMBER = re.compile(r"\b\d{1,3}(?:,\d{3})+\b|\b\d+(?:\.\d+)?\b")


def table(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table with this heading, without the heading itself."""
    lines = PAGE.splitlines()
    start = lines.index(heading) + 2
    rows: list[list[str]] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def number(text: str) -> float:
    found = NUMBER.search(text)
    assert found is not None, f"no number in {text!r}"
    return float(found[0].replace(",", ""))


REQUESTS = table("| tag | message | fields | arrays | answered by |")
REPLIES = table("| tag | message | fields | arrays |")
STRUCTS = table("| struct | fields |")
LIMITS = table("| what | value | name | where |")


def described(rows: list[list[str]]) -> dict[str, tuple[int, list[str]]]:
    return {names_in(name)[0]: (int(tag), names_in(fields)) for tag, name, fields, *_ in rows}


def defined(union: Any) -> dict[str, tuple[int, list[str]]]:
    found = {}
    for kind in get_args(union):
        tag = kind.__struct_config__.tag
        found[kind.__name__] = tag, [field.name for field in msgspec.structs.fields(kind)]
    return found


@pytest.mark.parametrize(
    ("rows", "union"),
    [(REQUESTS, messages.Request), (REPLIES, messages.Reply)],
    ids=["head to worker", "worker to head"],
)
def test_every_message_is_on_the_page_with_its_tag_and_its_fields_in_order(rows: list[list[str]], union: Any) -> None:
    assert described(rows) == defined(union)


def test_the_page_says_which_replies_answer_a_request() -> None:
    replies = {kind.__name__ for kind in get_args(messages.Reply)} | {"Parts", "then", "nothing"}
    for _, name, _, _, answer in REQUESTS:
        assert set(re.findall(r"\w+", answer)) <= replies, name


def test_structs_within_messages_have_the_fields_of_the_page() -> None:
    for name, fields in STRUCTS:
        kind = getattr(messages, names_in(name)[0])
        assert names_in(fields) == [field.name for field in msgspec.structs.fields(kind)], name


def test_the_ticket_has_the_fields_of_the_page() -> None:
    named = [name for key, _ in table("| key | value |") for name in names_in(key)]
    assert named == [field.name for field in msgspec.structs.fields(Ticket)]


def test_the_protocols_number_is_the_pages() -> None:
    stated = re.findall(r"protocol \*\*(\d+)\*\*|`PROTOCOL` in `wire/messages.py` is (\d+)", PAGE)
    assert [int("".join(pair)) for pair in stated] == [messages.PROTOCOL] * 2
    drawn = re.findall(r"(?:Register|Join)\((\d+), i", PAGE)
    assert drawn
    assert set(map(int, drawn)) == {messages.PROTOCOL}


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row[2])
def test_a_limit_is_the_codes(row: list[str]) -> None:
    _, value, name, where = row
    module = where.strip("`").removesuffix(".py").replace("/", ".")
    assert getattr(importlib.import_module(f"clusterenv.{module}"), names_in(name)[0]) == number(value)


def test_a_mailbox_is_laid_out_as_on_the_page() -> None:
    rows = [(int(number(offset)), int(number(size))) for offset, size, _ in table("| offset | size | content |")]
    offsets = [offset for offset, _ in rows]
    assert offsets == [0, shared._WORDS, shared._REQUEST, shared._REPLY, shared._NAMES]
    assert [offset + size for offset, size in rows] == [*offsets[1:], shared.MAILBOX_BYTES]


def test_the_words_of_a_mailbox_are_in_the_pages_order() -> None:
    rows = table("| word | name | written by | content |")
    stated = {f"_{names_in(name)[0]}": int(word) for word, name, *_ in rows}
    assert stated == {name: getattr(shared, name) for name in stated}
    assert list(stated.values()) == list(range(shared._STOP + 1))


def test_sizes_that_stand_for_no_bytes_are_the_codes() -> None:
    sizes = [size for size, _ in table("| size | meaning |")]
    assert sizes == ["2^64 - 1", "2^29 + x"]
    assert (shared._BY_SOCKET, shared._PLAIN) == (2**64 - 1, 2**29)


def test_every_large_number_in_the_text_is_that_of_a_limit_or_an_offset() -> None:
    known = {number(value) for _, value, *_ in LIMITS} | {shared._REQUEST, shared._REPLY, shared._NAMES}
    stated = {float(text.replace(",", "")) for text in re.findall(r"\b\d{1,3}(?:,\d{3})+\b", PAGE)}
    assert stated <= known, stated - known


@pytest.mark.parametrize(("source", "data"), EXAMPLE.findall(PAGE), ids=[name for name, _ in EXAMPLE.findall(PAGE)])
def test_an_example_is_encoded_as_on_the_page(source: str, data: str) -> None:
    made = eval(source, {**vars(messages), "np": np})
    encoded = messages.encode(made) if isinstance(made, msgspec.Struct) else values.dumps(made)
    assert encoded.hex(" ") == data


def test_there_are_examples_of_messages_and_of_values() -> None:
    assert len(EXAMPLE.findall(PAGE)) >= 5
