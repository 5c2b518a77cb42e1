"""Weights travel as one block of memory, and only weights that fit are taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array
from clusterenv.policy.weights import WeightSpec, WeightsSpec

dtypes = st.sampled_from([np.dtype(name) for name in ("f4", "f8", "f2", "i8", "u1", "?", "i2", "c8")])
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


@pytest.fixture
def weights() -> dict[str, Array]:
    rng = np.random.default_rng(3)
    return {
        "actor.weight": rng.standard_normal((64, 4)).astype(np.float32),
        "actor.bias": rng.standard_normal(64).astype(np.float32),
        "count": np.array(5, np.int64),
    }


@given(st.dictionaries(st.text(min_size=1, max_size=8), arrays, max_size=5))
@settings(max_examples=80, deadline=None)
def test_any_arrays_of_numbers_survive_the_round_trip(weights: dict[str, Array]) -> None:
    spec = WeightsSpec.of(weights)
    decoded = spec.decode(spec.encode(weights).tobytes())
    assert list(decoded) == list(weights)
    for name, array in weights.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].shape == array.shape
        assert decoded[name].tobytes() == array.tobytes()


def test_an_encoded_version_is_a_snapshot(weights: dict[str, Array]) -> None:
    spec = WeightsSpec.of(weights)
    block = spec.encode(weights)
    before = weights["actor.bias"].copy()
    weights["actor.bias"][...] = 0
    np.testing.assert_array_equal(spec.decode(block)["actor.bias"], before)


def test_decoding_copies_nothing_and_cannot_be_written_to(weights: dict[str, Array]) -> None:
    spec = WeightsSpec.of(weights)
    block = spec.encode(weights)
    decoded = spec.decode(block)
    assert all(np.shares_memory(array, block) for array in decoded.values())
    assert not any(array.flags.writeable for array in decoded.values())
    assert all(array.ctypes.data % array.dtype.itemsize == 0 for array in decoded.values())


def test_weights_can_be_encoded_into_memory_that_is_already_there(weights: dict[str, Array]) -> None:
    spec = WeightsSpec.of(weights)
    memory = np.zeros(spec.size_bytes, np.uint8)
    assert spec.encode(weights, memory) is memory
    np.testing.assert_array_equal(memory, spec.encode(weights))
    with pytest.raises(PolicyError, match="bytes"):
        spec.encode(weights, memory[:-1])


def test_a_transposed_array_is_encoded_in_reading_order() -> None:
    array: Array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    spec = WeightsSpec.of({"a": array})
    np.testing.assert_array_equal(spec.decode(spec.encode({"a": array}))["a"], array)


def test_little_memory_is_added_for_alignment(weights: dict[str, Array]) -> None:
    assert WeightsSpec.of(weights).size_bytes <= sum(array.nbytes for array in weights.values()) + 3 * 64


@pytest.mark.parametrize("change", [-1, 1, 64])
def test_a_block_of_another_size_is_refused(change: int, weights: dict[str, Array]) -> None:
    spec = WeightsSpec.of(weights)
    with pytest.raises(PolicyError, match="bytes"):
        spec.decode(bytes(spec.size_bytes + change))


def test_every_difference_is_named(weights: dict[str, Array]) -> None:
    spec = WeightsSpec.of(weights)
    wrong = {
        "actor.weight": weights["actor.weight"].T,
        "actor.bias": weights["actor.bias"].astype(np.float64),
        "extra": np.zeros(1),
    }
    with pytest.raises(PolicyError) as caught:
        spec.check(wrong)
    text = str(caught.value)
    assert "actor.weight: expected float32[64, 4], got float32[4, 64]" in text
    assert "actor.bias: expected float32[64], got float64[64]" in text
    assert "count: missing" in text
    assert "extra: unknown" in text


def test_the_order_of_given_weights_does_not_matter(weights: dict[str, Array]) -> None:
    spec = WeightsSpec.of(weights)
    backwards = dict(reversed(weights.items()))
    np.testing.assert_array_equal(spec.encode(backwards), spec.encode(weights))


@pytest.mark.parametrize("array", [np.array([None]), np.array(["text"]), np.array([b"x"]), np.zeros(1, "M8[s]")])
def test_only_numbers_are_weights(array: Array) -> None:
    with pytest.raises(PolicyError):
        WeightsSpec.of({"a": array})


@pytest.mark.parametrize(
    ("dtype", "shape"), [("nonsense", (1,)), ("O", (1,)), ("<f4", (-1,)), ("<f4,<f4", (1,)), ("V8", (1,))]
)
def test_a_spec_from_the_wire_is_checked(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(PolicyError):
        WeightSpec("a", dtype, shape)


def test_names_are_unique() -> None:
    with pytest.raises(PolicyError, match="twice"):
        WeightsSpec((WeightSpec("a", "<f4", (1,)), WeightSpec("a", "<f4", (2,))))


def test_a_policy_without_weights_has_an_empty_block() -> None:
    spec = WeightsSpec.of({})
    assert spec.size_bytes == 0
    assert spec.decode(spec.encode({})) == {}
