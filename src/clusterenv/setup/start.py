"""Start: launches workers, and has them make their environments."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from gymnasium.vector import AutoresetMode

from clusterenv.config import Faults, Network, Timeouts, split_shards, usable_cores, whole_number
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.head.calls import Calls
from clusterenv.head.interrupts import DeferInterrupt
from clusterenv.head.remote import Remote
from clusterenv.head.supervisor import Supervisor
from clusterenv.head.worker import Worker
from clusterenv.head.workers import WAIT_S, JoinWatch
from clusterenv.launchers.base import Fleet, Launcher
from clusterenv.setup.descriptors import allow_descriptors
from clusterenv.setup.factories import Factories, local_registry, pickle_code
from clusterenv.setup.sample import ObservationMode, Sample, make_sample
from clusterenv.setup.trial import check_factory, describe_here
from clusterenv.wire import semaphore
from clusterenv.wire.address import choose_addresses
from clusterenv.wire.assignment import Assignment
from clusterenv.wire.zeromq import HeadSocket


def count_workers(num_workers: int | None, num_envs: int, launcher: Launcher) -> int:
    """Return how many workers to start, choosing a default if the user gave none."""
    if num_workers is None:
        return min(launcher.suggested_workers or usable_cores(), num_envs)
    num_workers = whole_number("num_workers", num_workers, least=0)
    if num_workers > num_envs:
        given = f"num_envs={num_envs}{' (the default)' if num_envs == 1 else ''}"
        raise ConfigError(f"num_workers={num_workers}, but {given}: every worker hosts at least one environment.")
    return num_workers


def make_assignment(
    factories: Factories, shard: tuple[int, int], mode: AutoresetMode, on_env_error: str, registry: list[bytes]
) -> Assignment:
    """Return the assignment for a shard, environments `[start, stop)`."""
    start, stop = shard
    return Assignment(
        factories=factories.for_shard(start, stop),
        registry=registry,
        autoreset_mode=mode,
        start=start,
        num_rows=stop - start,
        num_envs=factories.num_envs,
        on_env_error=on_env_error,
    )


def start_workers(
    launcher: Launcher,
    factories: Factories,
    num_workers: int,
    *,
    mode: AutoresetMode,
    observation_mode: ObservationMode,
    faults: Faults,
    network: Network,
    timeouts: Timeouts,
    on_start: Callable[[Remote], None],
) -> tuple[Remote, Sample]:
    """Launch workers and assign each its shard; returns when enough workers are ready.

    Args:
        launcher: Starts the workers.
        factories: Make the environments.
        num_workers: How many workers the environments are divided among.
        mode: How environments are reset.
        observation_mode: How observation spaces are batched.
        faults: What happens when workers are lost.
        network: How workers reach the head.
        timeouts: How long to wait for workers.
        on_start: Called with the workers as soon as they are launched; from then on, the caller must close them.
    """
    if network.transport == "shm" and not semaphore.IS_SUPPORTED:
        raise ConfigError("transport='shm' needs Linux; use 'auto' or 'zmq' here.")
    allow_descriptors(num_workers)
    shards = split_shards(factories.num_envs, num_workers)
    registry = local_registry()
    code = {
        shard[0]: pickle_code(
            make_assignment(factories, shard, mode, faults.on_env_error, registry),
            f"The factory of environments {shard[0]} to {shard[1] - 1}",
        )
        for shard in shards
    }
    first = make_assignment(factories, (0, 1), mode, faults.on_env_error, registry)
    if launcher.queues and timeouts.trial_s:
        check_factory(first, timeouts.trial_s)
    addresses = choose_addresses(network.listen, network.advertise, launcher.route_to)
    workers = [Worker(index, start, stop) for index, (start, stop) in enumerate(shards)]
    socket: HeadSocket | None = None
    fleet: Fleet | None = None
    remote: Remote | None = None
    try:
        with DeferInterrupt():
            socket = HeadSocket(addresses, timeouts.silence_s)
        fleet = launcher.launch(msgspec.structs.replace(socket.ticket, hang_s=timeouts.call_s), num_workers)
        remote = Remote(
            Calls(socket, fleet, workers, timeouts),
            fleet,
            workers,
            Supervisor(workers, faults, timeouts, time.monotonic()),
            timeouts,
            assignments=code.__getitem__,
            autoreset_mode=mode,
            shares_memory=network.transport != "zmq" and semaphore.IS_SUPPORTED,
        )
        on_start(remote)
        at_least = num_workers if faults.min_workers is None or observation_mode == "different" else faults.min_workers
        _await_workers(remote, lambda worker: worker.description is not None, at_least)
        descriptions = [(w.num_envs, w.description) for w in workers if w.description is not None]
        sample = make_sample(
            descriptions, observation_mode, factories.num_envs, lambda: describe_here(first, timeouts.join_s)
        )
        remote.open(sample.run_spaces)
        _await_workers(remote, lambda worker: worker.is_ready, at_least)
        remote.preparation.packages.tell()
        for worker in workers:
            if worker.peer is None:
                remote.supervisor.begin_without(worker)
        if network.transport == "shm" and any(w.mailbox is None for w in workers if w.is_ready):
            raise LaunchError(
                "transport='shm', but a worker cannot reach the head's shared memory: it runs on another machine, in "
                "another container or as another user. transport='auto' uses ZeroMQ for such workers."
            )
    except BaseException:
        if remote is not None:
            remote.close(terminate=True)
        else:
            if fleet is not None:
                fleet.stop(0.0)
            if socket is not None:
                socket.close()
        raise
    return remote, sample


def _await_workers(remote: Remote, has_come: Callable[[Worker], bool], at_least: int) -> None:
    """Wait until `has_come` is true of this many workers.

    Raises:
        LaunchError: A worker ended or cannot join, or workers took too long.
        WorkerFailed: A factory raised.
    """
    watch = JoinWatch(remote)
    while sum(map(has_come, remote.workers)) < at_least:
        remote.advance(WAIT_S)
        remote.raise_fatal(remote.workers)
        for worker in remote.workers:
            if worker.misfit:
                raise LaunchError(f"Worker {worker.index} cannot join: {worker.misfit}.")
        watch.look()
