"""Start: from factories to workers with environments on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clusterenv.config import Timeouts, split_shards, usable_cores
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.factories import pickle_code
from clusterenv.head.hub import Hub
from clusterenv.head.remote import Remote
from clusterenv.head.remote_plan import RemotePlan
from clusterenv.launchers.base import Launcher
from clusterenv.plan import Plan
from clusterenv.wire import semaphore
from clusterenv.wire.address import choose_addresses
from clusterenv.wire.layout import Layout
from clusterenv.wire.zeromq import HeadSocket

TRANSPORTS = ("auto", "shm", "zmq")
ON_LOSS = ("replace", "raise")
ON_ENV_ERROR = ("raise", "reset")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How head and workers find each other and talk; `ClusterEnv` has each of these as an argument."""

    transport: str = "auto"
    listen: str | None = None
    advertise: str | None = None
    on_loss: str = "replace"
    min_workers: int | None = None
    on_env_error: str = "raise"
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}.")
        if self.transport == "shm" and not semaphore.IS_SUPPORTED:
            raise ConfigError("transport='shm' needs Linux; use 'auto' or 'zmq' here.")
        if self.on_loss not in ON_LOSS:
            raise ConfigError(f"on_loss must be one of {', '.join(ON_LOSS)}, got {self.on_loss!r}.")
        if self.on_env_error not in ON_ENV_ERROR:
            raise ConfigError(f"on_env_error must be one of {', '.join(ON_ENV_ERROR)}, got {self.on_env_error!r}.")


def count_workers(num_workers: int | None, num_envs: int, launcher: Launcher) -> int:
    """Return how many workers there will be, where the user may have left that open."""
    if num_workers is None:
        return min(launcher.num_workers or usable_cores(), num_envs)
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ConfigError(f"num_workers must be an int of at least 0, got {num_workers!r}.")
    if num_workers > num_envs:
        raise ConfigError(f"num_workers={num_workers}, but there are only {num_envs} environments to share out.")
    return num_workers


def start_workers(
    launcher: Launcher,
    num_envs: int,
    num_workers: int,
    options: Options,
    make_plan: Callable[[], Plan],
) -> tuple[Remote, Plan]:
    """Launch workers and give each its shard; returns when all environments are made.

    Args:
        launcher: Starts them.
        num_envs: Of the whole run.
        num_workers: Among whom they are shared out.
        options: How to reach and keep them.
        make_plan: Makes the plan. It is called while the workers are coming up, so it may take its time.
    """
    shards = split_shards(num_envs, num_workers)
    timeouts = options.timeouts
    addresses = choose_addresses(options.listen, options.advertise, launcher.route_to)
    socket = HeadSocket(*addresses, timeouts.silence_s)
    try:
        fleet = launcher.launch(socket.ticket, num_workers)
    except BaseException:
        socket.close()
        raise
    hub = Hub(socket, fleet, shards, timeouts)
    remote: Remote | None = None
    try:
        plan = make_plan()
        code = {
            start: pickle_code(plan.assignment(start, stop), f"The factory of environments {start} to {stop - 1}")
            for start, stop in shards
        }
        hub.gather_workers(num_workers if options.min_workers is None else options.min_workers)
        remote = Remote(
            hub,
            RemotePlan(
                code=code.__getitem__,
                actions=Layout(plan.sample.single_action_space),
                observations=Layout(plan.sample.single_observation_space),
                autoreset_mode=plan.autoreset_mode,
                shares_memory=options.transport != "zmq" and semaphore.IS_SUPPORTED,
                replaces=options.on_loss == "replace",
            ),
        )
        remote.open()
        if options.transport == "shm" and not all(hub.shares_memory(m) for m in hub.members if m.is_ready):
            raise LaunchError(
                "transport='shm', but a worker cannot reach the head's shared memory: it runs on another machine, in "
                "another container or as another user. transport='auto' uses ZeroMQ for such workers."
            )
    except BaseException:
        (remote or hub).close(terminate=True)
        raise
    return remote, plan
