"""The codec for values: what goes in comes out, and nonsense is refused."""

from __future__ import annotations

import contextlib
import enum
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from clusterenv import RemoteObject
from clusterenv.errors import WireError
from clusterenv.wire import values

pytestmark = pytest.mark.quick

PLAIN_DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(),
    npst.byte_string_dtypes(),
    npst.unicode_string_dtypes(),
    npst.datetime64_dtypes(max_period="ns", min_period="ns"),
)
ARRAYS = PLAIN_DTYPES.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=4)))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    ARRAYS,
    ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.flat[0]),
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.text(), max_size=4),
    ),
    max_leaves=12,
)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, np.generic):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, float | complex):
        assert repr(left) == repr(right)
    else:
        assert left == right


@given(VALUES)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert_same(values.loads(values.dumps(value)), value)


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_random_bytes_are_a_value_or_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        values.loads(data)


@given(VALUES, st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_damaged_values_are_a_value_or_refused(value: Any, data: st.DataObject) -> None:
    frame = bytearray(values.dumps(value))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    with warnings.catch_warnings(), contextlib.suppress(WireError):
        warnings.simplefilter("ignore")
        values.loads(cut)


def test_object_arrays_keep_their_items() -> None:
    array = np.array([None, "a", {"b": 1}], dtype=object)
    back = values.loads(values.dumps(array))
    assert back.dtype == object
    assert list(back) == list(array)


def test_a_generator_goes_on_where_it_was() -> None:
    generator = np.random.default_rng(3)
    generator.random(5)
    copy = values.loads(values.dumps(generator))
    assert copy.random() == generator.random()


def test_a_graph_arrives_whole() -> None:
    graph = spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3), seed=1).sample(num_nodes=3, num_edges=2)
    back = values.loads(values.dumps(graph))
    assert isinstance(back, GraphInstance)
    assert_same(tuple(back), tuple(graph))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 3), np.float32),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary((2, 2)),
        spaces.Text(5, charset="abc"),
        spaces.Dict(z=spaces.Discrete(2), a=spaces.Tuple([spaces.Discrete(3)])),
        spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
        spaces.Graph(spaces.Box(0, 1, (2,)), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_travel(space: gym.Space[Any]) -> None:
    assert values.loads(values.dumps(space)) == space


def test_a_spec_travels() -> None:
    spec = gym.spec("CartPole-v1")
    assert values.loads(values.dumps(spec)) == spec


class Colour(enum.IntEnum):
    RED = 3


def test_enums_arrive_as_their_value() -> None:
    assert values.loads(values.dumps(Colour.RED)) == 3


class Thing:
    def __repr__(self) -> str:
        return "a thing"


def test_a_users_own_object_arrives_as_its_text_with_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="Thing"):
        back = values.loads(values.dumps({"x": Thing()}))
    assert back["x"] == RemoteObject(f"{__name__}.Thing", "a thing")


def test_a_value_within_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(WireError):
        values.dumps(value)


def test_arrays_of_pointers_are_refused() -> None:
    frame = values.dumps(np.zeros(2, np.float64)).replace(b"<f8", b"|O8")
    with pytest.raises(WireError):
        values.loads(frame)


def test_a_pickle_is_never_opened() -> None:
    with pytest.raises(WireError):
        values.loads(b"\x80\x05\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94")
