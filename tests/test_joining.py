"""Which key opens which worker's place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clusterenv.head.joining import Admission, Decision, Places
from clusterenv.head.worker import Worker

Event = tuple[Callable[[Places, float], object], object]
ACCEPTED = (Admission.ACCEPTED, "")
DEFERRED = (Admission.DEFERRED, "")


def register(index: int, key: str, expected: Decision, *, is_cut_off: bool = False) -> Event:
    return lambda places, now: places.register(index, key, now, is_cut_off=is_cut_off), expected


def join(index: int, key: str, expected: Decision) -> Event:
    return lambda places, now: places.join(index, key), expected


def give_up(index: int, *, accepts_another: bool = False) -> Event:
    return lambda places, now: places.give_up(index, now), accepts_another


def keys(**expected: int) -> Event:
    return lambda places, now: dict(places.keys), expected


def refused(reason: str) -> Decision:
    return Admission.REFUSED, reason


IS_HERE = [register(0, "a", ACCEPTED), join(0, "a", ACCEPTED)]

# Each story happens to a run of two workers, one event a second.
STORIES: dict[str, list[Event]] = {
    "two workers join": [*IS_HERE, register(1, "b", ACCEPTED), join(1, "b", ACCEPTED), keys(a=0, b=1)],
    "a place that is not there": [
        register(2, "a", refused("there is no worker 2, this run has 2")),
        register(-1, "a", refused("there is no worker -1, this run has 2")),
        join(2, "a", refused("there is no worker 2, this run has 2")),
        keys(),
    ],
    "nobody joins with a key that is not registered": [
        join(0, "ticket", refused("it has not registered its key as that of worker 0")),
        register(0, "a", ACCEPTED),
        join(0, "b", refused("it has not registered its key as that of worker 0")),
        join(1, "a", refused("it has not registered its key as that of worker 1")),
        join(0, "a", ACCEPTED),
    ],
    "one key is for one place": [
        register(0, "a", ACCEPTED),
        register(1, "a", refused("its key already belongs to worker 0")),
        keys(a=0),
    ],
    "whoever is here is not displaced": [
        *IS_HERE,
        register(0, "b", refused("worker 0 has joined already")),
        join(0, "b", refused("worker 0 has joined already")),
        join(0, "a", refused("worker 0 has joined already")),
        keys(a=0),
    ],
    "one that registers is not displaced at once": [
        register(0, "a", ACCEPTED),
        register(0, "b", refused("another process has just registered as worker 0")),
        register(0, "a", ACCEPTED),
        join(0, "a", ACCEPTED),
    ],
    "one that registers and never joins does not keep the place": [
        register(0, "a", ACCEPTED),
        *[keys(a=0)] * 9,
        register(0, "b", ACCEPTED),
        keys(b=0),
        join(0, "a", refused("it has not registered its key as that of worker 0")),
        join(0, "b", ACCEPTED),
    ],
    "one that is given up can be replaced, and its key is worth nothing": [
        *IS_HERE,
        give_up(0),
        keys(),
        join(0, "a", refused("it has not registered its key as that of worker 0")),
        register(0, "b", ACCEPTED),
        register(0, "a", refused("another process has just registered as worker 0")),
        join(0, "b", ACCEPTED),
        register(0, "a", refused("worker 0 has joined already")),
        join(0, "a", refused("worker 0 has joined already")),
    ],
    "one that was given up may come back while its place is vacant": [
        *IS_HERE,
        give_up(0),
        register(0, "a", ACCEPTED),
        join(0, "a", ACCEPTED),
    ],
    "one that comes back early waits until it is given up": [
        *IS_HERE,
        register(0, "a", DEFERRED),
        join(0, "a", refused("worker 0 has joined already")),
        keys(a=0),
        give_up(0, accepts_another=True),
        join(0, "a", ACCEPTED),
        keys(a=0),
    ],
    "a successor waits until the worker that is cut off is given up": [
        *IS_HERE,
        register(0, "b", DEFERRED, is_cut_off=True),
        join(0, "b", refused("worker 0 has joined already")),
        keys(a=0),
        give_up(0, accepts_another=True),
        keys(b=0),
        join(0, "b", ACCEPTED),
        give_up(0),
        keys(),
    ],
    "one that waits for a place and takes another does not get both": [
        *IS_HERE,
        register(0, "b", DEFERRED, is_cut_off=True),
        register(1, "b", ACCEPTED),
        give_up(0),
        keys(b=1),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_place_belongs_to_the_key_that_was_registered_for_it(story: list[Event]) -> None:
    places = Places([Worker(0, 0, 1), Worker(1, 1, 2)])
    for second, (happen, expected) in enumerate(story):
        assert happen(places, float(second)) == expected, f"after {second} s"


def test_nobody_else_need_be_started_for_a_place_that_is_registered_for() -> None:
    worker = Worker(0, 0, 1)
    places = Places([worker])
    assert worker.place.key is None
    places.register(0, "a", 0.0)
    assert worker.place.key == "a"
    places.give_up(0, 1.0)
    assert worker.place.key is None
