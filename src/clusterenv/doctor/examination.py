"""Examination: runs a tiny environment through the launcher, and reports what that shows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from clusterenv.config import Faults, Network, Timeouts
from clusterenv.doctor.diagnosis import STEPS, Finding, Witness, diagnose
from clusterenv.doctor.probe import Probe, try_environment
from clusterenv.env import ClusterEnv
from clusterenv.errors import ClusterEnvError
from clusterenv.launchers.base import Launcher
from clusterenv.wire.compatibility import installed_versions

_NUM_ROUND_TRIPS = 200
_SMALL_BYTES = 1 << 18
_LARGE_BYTES = 1 << 23
_NUM_LARGE = 3
_MOMENT_S = 0.5


def examine(
    launcher: Launcher,
    num_workers: int,
    *,
    env_id: str | None = None,
    addresses: tuple[str | None, str | None] = (None, None),
    join_s: float = 120.0,
) -> Iterator[Finding]:
    """Start workers, check them and measure; yield findings as they are made.

    Args:
        launcher: Starts the workers.
        num_workers: The number of workers.
        env_id: An environment to try on each worker.
        addresses: Where to listen and what to advertise, as in `Network`.
        join_s: How long workers may take to join.
    """
    witness = Witness(launcher)
    listen, advertise = addresses
    began = time.monotonic()
    try:
        envs = ClusterEnv(
            [Probe] * num_workers,
            num_workers=num_workers,
            launcher=witness,
            timeouts=Timeouts(join_s=join_s),
            faults=Faults(on_loss="raise"),
            network=Network(listen=listen, advertise=advertise),
        )
    except ClusterEnvError as error:
        yield from diagnose(error, witness)
        return
    joined_s = time.monotonic() - began
    with envs:
        try:
            places = envs.call("describe_place")
            yield from _describe_start(places, joined_s, witness.endpoint or "")
            yield _judge_versions(places)
            yield _judge_threads(places)
            if env_id is not None:
                yield _judge_environment(env_id, [try_environment(env_id), *envs.call("try_environment", env_id)])
            yield _measure_round_trip(envs)
            yield _measure_width(envs)
        except ClusterEnvError as error:
            yield Finding("run", False, str(error), "Workers came up and then failed: their log says why.")


def _describe_start(places: Sequence[dict[str, Any]], joined_s: float, endpoint: str) -> Iterator[Finding]:
    hosts = Counter(place["hostname"] for place in places)
    pythons = sorted({place["python"] for place in places})
    yield Finding("start", True, f"{STEPS['start']}: {_list(f'{count} on {host}' for host, count in hosts.items())}")
    yield Finding("python", True, f"{STEPS['python']}: {_list(pythons)}")
    yield Finding("reach", True, f"{STEPS['reach']} at {endpoint}; all had joined after {joined_s:.1f} s")


def _judge_versions(places: Sequence[dict[str, Any]]) -> Finding:
    ours = installed_versions()
    differences = sorted(
        {
            f"{name} {version} on {place['hostname']}, {ours[name]} here"
            for place in places
            for name, version in place["versions"].items()
            if version != ours[name]
        }
    )
    if not differences:
        return Finding("versions", True, f"the same on both sides: {_list(f'{n} {v}' for n, v in ours.items())}")
    # Workers with incompatible versions were refused when they joined.
    return Finding("versions", True, f"close enough, though not the same: {'; '.join(differences)}")


def _judge_threads(places: Sequence[dict[str, Any]]) -> Finding:
    texts, next_step = [], ""
    for host in dict.fromkeys(place["hostname"] for place in places):
        here = [place for place in places if place["hostname"] == host]
        cores = max(place["cores"] for place in here)
        wanted = sum(place["threads"] or cores for place in here)
        texts.append(
            f"{_count(len(here), 'worker')} with {_count(wanted, 'thread')} on {_count(cores, 'core')} of {host}"
        )
        if len(here) > cores:
            next_step = f"Ask for at most {cores} workers on {host}, or for more cores for them."
        elif wanted > cores:
            next_step = "Too many threads slow each other down: set OMP_NUM_THREADS=1 there, or --cpus 1."
    return Finding("threads", not next_step, "; ".join(texts), next_step)


def _judge_environment(env_id: str, trials: Sequence[dict[str, Any]]) -> Finding:
    names = ["this machine", *(f"worker {index}" for index in range(len(trials) - 1))]
    failures: dict[str, list[str]] = {}
    for name, trial in zip(names, trials, strict=True):
        if "error" in trial:
            failures.setdefault(trial["error"], []).append(name)
    if failures:
        return Finding(
            "environment",
            False,
            "; ".join(f"{env_id} on {_list(where)}: {error}" for error, where in failures.items()),
            _advise(failures),
        )
    make_s, step_s = (max(trial[name] for trial in trials[1:]) for name in ("make_s", "step_s"))
    return Finding(
        "environment", True, f"{env_id} works on all: made within {make_s:.2f} s, {step_s * 1e6:.0f} us a step"
    )


def _advise(failures: Mapping[str, Sequence[str]]) -> str:
    own = "An environment of your own is named with its module, my_module:MyEnv-v0, and the module must be importable "
    unknown = [where for error, where in failures.items() if error.startswith(("NameNotFound", "VersionNotFound"))]
    if any("this machine" in where for where in unknown):
        return f"Check the spelling: python -c 'import gymnasium; gymnasium.pprint_registry()' lists all. {own}there."
    return f"Install what it needs there. {own}there: install it, or set PYTHONPATH in --setup."


def _measure_round_trip(envs: ClusterEnv) -> Finding:
    envs.reset(seed=0)
    actions = np.zeros(envs.num_envs, np.int64)
    times = [_time(lambda: envs.step(actions)) for _ in range(_NUM_ROUND_TRIPS)]
    median, slow = np.percentile(times, [50, 95]) * 1e3
    return Finding(
        "round trip", True, f"{median:.2f} ms for a step with all workers (median; 95 % within {slow:.2f} ms)"
    )


def _measure_width(envs: ClusterEnv) -> Finding:
    """Send arrays both ways: small ones first, then ones as large as can be sent in about half a second."""
    small_s = max(_time_both_ways(envs, _SMALL_BYTES))
    size = int(np.clip(_SMALL_BYTES * _MOMENT_S / small_s, _SMALL_BYTES, _LARGE_BYTES))
    # The minimum of several: other activity can only add time.
    there_s, back_s = np.min([_time_both_ways(envs, size) for _ in range(_NUM_LARGE)], axis=0)
    megabits = size * envs.num_envs * 8 / 1e6
    return Finding(
        "bandwidth",
        True,
        f"{megabits / there_s:,.0f} Mbit/s to all workers, {megabits / back_s:,.0f} Mbit/s from them "
        f"({size / 1e6:.1f} MB each)",
    )


def _time_both_ways(envs: ClusterEnv, size_bytes: int) -> tuple[float, float]:
    array = np.zeros(size_bytes, np.uint8)
    return _time(lambda: envs.call("take", array)), _time(lambda: envs.call("send_back", size_bytes))


def _time(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def _list(items: Iterable[str]) -> str:
    return ", ".join(items)
