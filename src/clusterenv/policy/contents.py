"""Contents: what a policy's pickle carries by value, and how changes to it reach the copies on workers.

Code is sent once. What it refers to by value (attributes, closure cells, globals of a script, arguments of a partial,
the object of a bound method) is copied with it, and would go stale on workers. So a walk through everything that
cloudpickle would copy finds these values, and divides them into three kinds:

- *arrays*, such as a network's parameters: sent as a version's weights;
- *plain values*, such as a temperature, a flag, a mode, a small array: compared at every call, and sent with the next
  version, in a block of bytes that is one more array of the weights;
- *structure*, such as classes, layers, what a function refers to: if it changes, the whole policy is sent again.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.policy.array_kinds import NUMPY, ArrayKind
from clusterenv.policy.distribution import Array
from clusterenv.policy.stripping import SCALARS, Restorer, Stripper, dump, forget
from clusterenv.policy.walk import Place, Walk
from clusterenv.policy.weights import Weights, WeightsSpec

log = logging.getLogger(__name__)

VALUES = "(plain values)"
"""The name, among the weights, of the block that holds plain values."""


class Contents:
    """What some objects carry by value, found by a walk on the head.

    Attributes:
        payload: The objects.
        generation: How often the structure has changed.
    """

    def __init__(
        self,
        payload: Any,
        kinds: Sequence[ArrayKind] = (),
        own: Callable[[], Weights] | None = None,
        *,
        warns: bool = True,
    ) -> None:
        """Find out what the payload carries.

        Args:
            payload: The objects to be sent.
            kinds: The frameworks whose arrays the payload may hold, besides numpy's.
            own: Returns arrays to leave out, because they are sent otherwise.
            warns: Whether to log what cannot be watched: not for a copy of what was looked at before.
        """
        self.payload = payload
        self.generation = 0
        self._kinds = tuple(kinds)
        self._own = own
        self._warns = warns
        self._warned: set[str] = set()
        self._block: tuple[Hashable, Array] | None = None
        self._block_is_of: Hashable = None
        self._capacity = 0
        self._num_walks = 0
        self._last_values: Hashable = None
        self._take()

    def stamp(self) -> Hashable:
        """Return a value that differs from the last one returned if anything may have changed since."""
        if (values := self._read_values()) is None:
            before = self._signature
            self._take()
            self._num_walks += 1
            if self._signature != before:
                self.generation += 1
                self._capacity = 0
            values = self._read_values()
        if values != self._last_values:
            self._last_values = values
            if self._slots:
                self._encode_values()  # The values may no longer fit their block.
        return self.generation, self._num_walks, values, tuple([read() for read in self._watches])

    def plain_values(self) -> Hashable:
        """Return the plain values, for comparison with those at another time."""
        return self._last_values

    def read_plain(self) -> list[tuple[str, Any]]:
        """Return the plain values themselves, each with its path."""
        return [(path, place.read()) for place, path in self._slots]

    def announce(self) -> None:
        """Treat whatever cannot be compared as changed: if there is any, the next call sends everything again."""
        self.generation += self._is_blind

    def weights(self) -> dict[str, Array]:
        """Return the arrays by name and, if there are plain values, the block that holds them."""
        arrays = {name: kind.view(array) for name, (kind, array) in self._arrays.items()}
        if self._slots:
            arrays[VALUES] = self._encode_values()
        return arrays

    def parameters(self) -> dict[str, Array]:
        """Return the arrays that a learner's optimizer writes to."""
        return {name: kind.view(array) for name, (kind, array) in self._arrays.items() if kind.is_weight(array)}

    def pack(self) -> bytes:
        """Pickle the payload without the values of its arrays.

        Raises:
            PolicyError: Something in it cannot be pickled.
        """
        self._take()  # The payload may have changed since the last walk.
        slots, caches = [place for place, _ in self._slots], self._caches
        arrays = [(name, type(kind), array) for name, (kind, array) in self._arrays.items()]
        buffer = io.BytesIO()
        pickler = Stripper(buffer, self._kinds, {id(array) for _, array in self._arrays.values()})
        try:
            pickler.dump((self.payload, slots, caches, arrays, self.weights().get(VALUES)))
        except PolicyError:
            raise
        except Exception as error:
            why = f", because of its {self._unsendable[0]}" if self._unsendable else ""
            raise PolicyError(
                f"The agent cannot be sent to workers{why}: {error}. Keep what only the learner needs (an environment, "
                "a logger, a lock) outside of the agent."
            ) from error
        return buffer.getvalue()

    def _take(self) -> None:
        walk = Walk(self._kinds, {} if self._own is None else self._own())
        walk.visit(self.payload, None, "")
        self._block_is_of = None
        self._signature = tuple(walk.signature), tuple(walk.arrays), tuple(path for _, path in walk.slots)
        self._arrays, self._slots, self._caches = walk.arrays, walk.slots, walk.caches
        self._lengths = [(container, len(container)) for container in walk.containers]
        self._instances, self._classes = walk.instances, [type(instance) for instance in walk.instances]
        self._same = [(place.mapping(), place.key, value) for place, value in walk.same]
        self._scalars = [(place.mapping(), place.key) for place, _ in walk.scalars]
        self._deep = [place for place, _ in walk.deep]
        by_kind: dict[ArrayKind, list[Any]] = {}
        for kind, array in walk.arrays.values():
            by_kind.setdefault(kind, []).append(array)
        self._watches = [kind.watch(arrays) for kind, arrays in by_kind.items()]
        self._is_blind = bool(walk.warnings)
        self._unsendable = walk.unsendable
        for warning in walk.warnings:
            if self._warns and warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s", warning)

    def _read_values(self) -> Hashable:
        """Return all plain values; None if any is no longer where it was, so that a new walk is needed."""
        for container, length in self._lengths:
            if len(container) != length:
                return None
        if [type(instance) for instance in self._instances] != self._classes:
            return None
        try:
            for mapping, key, value in self._same:
                if mapping[key] is not value:
                    return None
            scalars = [mapping[key] for mapping, key in self._scalars]
            deep = tuple([_freeze(place.read(), self._kinds) for place in self._deep]) if self._deep else None
        except (KeyError, IndexError, AttributeError, ValueError):  # ValueError: an empty cell.
            return None
        kinds = [type(scalar) for scalar in scalars]
        return None if not SCALARS.issuperset(kinds) else (tuple(scalars), tuple(kinds), deep)

    def _dump_slot(self, place: Place, path: str) -> bytes:
        try:
            return dump(place.read(), self._kinds)
        except Exception as error:
            raise PolicyError(
                f"The agent cannot be sent to workers, because of its {path}: {error}. Keep what only the learner "
                "needs (an environment, a logger, a lock) outside of the agent."
            ) from error

    def _encode_values(self) -> Array:
        read = self._read_values()
        if self._block is not None and read is not None and read == self._block_is_of:
            return self._block[1]  # Comparing is faster than pickling, and this is done for every version.
        values = tuple(self._dump_slot(place, path) for place, path in self._slots)
        self._block_is_of = read
        if self._block is not None and self._block[0] == values and len(self._block[1]) == self._capacity:
            return self._block[1]
        data = pickle.dumps(values, 5)
        if len(data) + 8 > self._capacity:
            if self._capacity:
                self.generation += 1  # The weights no longer have the same shapes: the whole policy is sent again.
            self._capacity = -(-(2 * len(data) + 8) // 256) * 256
        block = np.zeros(self._capacity, np.uint8)
        block[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        block[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self._block = values, block
        return block


class Delivered:
    """A worker's own copy of a payload, whose arrays and plain values the head can overwrite.

    Attributes:
        payload: The objects.
        classes: The classes that the payload does not import, but has its own copies of.
    """

    def __init__(self, packed: bytes) -> None:
        self.classes: dict[str, type] = {}
        try:
            self.payload, self._slots, self._caches, arrays, block = Restorer(packed, self.classes).load()
        except ModuleNotFoundError as error:
            raise PolicyError(
                f"The agent needs the module {error.name!r}, which cannot be imported here. Install it where workers "
                "run, or have cloudpickle send it: cloudpickle.register_pickle_by_value(module)."
            ) from error
        self._arrays: dict[str, tuple[ArrayKind, Any]] = {name: (kind(), array) for name, kind, array in arrays}
        self._block: Array | None = block
        self._values = () if block is None else _split(block)
        copied = set(self.classes.values())
        for place, value in zip(self._slots, self._values, strict=False):
            if isinstance(place.owner, type) and place.owner not in copied:  # A class that was imported here.
                place.write(Restorer(value, self.classes).load())
        self._spec = WeightsSpec.of(self.weights())

    def weights(self) -> dict[str, Array]:
        """Return the arrays, and the block of plain values, as last loaded."""
        arrays = {name: kind.view(array) for name, (kind, array) in self._arrays.items()}
        return arrays if self._block is None else {**arrays, VALUES: self._block}

    def named_arrays(self) -> dict[str, Any]:
        """Return the payload's own arrays by name."""
        return {name: array for name, (_, array) in self._arrays.items()}

    def empty_caches(self) -> None:
        """Empty what `lru_cache` and `cached_property` keep, except for random generators."""
        for cache in self._caches:
            forget(cache)

    def load(self, weights: Weights) -> bool:
        """Overwrite arrays in place, and plain values that have changed on the head; return whether any of these has.

        Plain values that this copy itself has changed stay, unless the head has changed them too.

        Raises:
            PolicyError: Names, shapes or dtypes do not fit.
        """
        self._spec.check(weights)
        for name, (kind, array) in self._arrays.items():
            kind.write(array, weights[name])
        self.empty_caches()
        if self._block is None:
            return False
        self._block = weights[VALUES].copy()
        if not (values := _split(self._block)):
            return False
        before, self._values = self._values, values
        changed = [index for index, value in enumerate(self._values) if value != before[index]]
        for index in changed:
            self._slots[index].write(Restorer(self._values[index], self.classes).load())
        return bool(changed)


def is_delivered(policy: Any) -> bool:
    """Return whether a policy is a copy that was sent by value, with its own classes."""
    return isinstance(getattr(policy, "delivered", None), Delivered)


def read_values(policy: Any, pickled: bytes | None) -> dict[str, Any]:
    """Unpickle per-call values for a worker's policy, using the policy's own classes."""
    if pickled is None:
        return {}
    values: dict[str, Any]
    if is_delivered(policy):
        values = Restorer(pickled, policy.delivered.classes).load()
    else:
        values = pickle.loads(pickled)  # noqa: S301 - from the head
    return values


def _freeze(value: Any, kinds: Sequence[ArrayKind]) -> Hashable:
    """Return something hashable that differs if the value does."""
    for kind in (*kinds, NUMPY):
        if kind.is_array(value):
            array = kind.view(value)
            return array.shape, array.dtype.str, array.tobytes()
    return dump(value, kinds)


def _split(block: Array) -> tuple[bytes, ...]:
    if (size := int.from_bytes(block[:8].tobytes(), "little")) == 0:
        return ()
    values: tuple[bytes, ...] = pickle.loads(block[8 : 8 + size].tobytes())  # noqa: S301 - from the head
    return values


def generation_of(policy: object) -> int:
    """Return how often a policy's structure has changed; 0 if the policy does not say."""
    generation: int = getattr(policy, "generation", 0)
    return generation


def announce(policy: object) -> None:
    """Make the next call send the whole policy again, if parts of it cannot be compared."""
    if (tell := getattr(policy, "announce", None)) is not None:
        tell()
