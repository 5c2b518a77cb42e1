"""ClusterEnv: many environments on many workers, and to the learner one `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from clusterenv.actions import ActionWriter
from clusterenv.config import Timeouts, split_shards, usable_cores
from clusterenv.errors import ConfigError
from clusterenv.factories import EnvArgument, Factories, local_registry, pickle_code, resolve
from clusterenv.head.hub import Hub, make_nonce
from clusterenv.head.outcome import Outcome
from clusterenv.inline import Inline
from clusterenv.launchers.base import Launcher
from clusterenv.launchers.local import LocalLauncher
from clusterenv.sample import ObservationMode, Sample, take_sample
from clusterenv.wire import semaphore
from clusterenv.wire.assignment import Assignment
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes
from clusterenv.wire.shared import Segment
from clusterenv.wire.zeromq import HeadSocket
from clusterenv.worker.native import make_host

Stepped = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_TRANSPORTS = ("auto", "shm", "zmq")
_REFUSED_CALLS = ("reset", "step", "close", "_setattr", "_check_spaces")


class ClusterEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """Runs environments on worker processes and steps them as one vector environment.

    With the same factories, seeds and actions the results equal `gymnasium.vector.SyncVectorEnv`'s bit for bit,
    however many workers there are.
    """

    def __init__(
        self,
        env: EnvArgument,
        num_envs: int | None = None,
        *,
        num_workers: int | None = None,
        launcher: Launcher | None = None,
        transport: str = "auto",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        observation_mode: ObservationMode = "same",
        copy: bool = True,
        env_kwargs: dict[str, Any] | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Start the workers and make the environments; returns when all are ready.

        Args:
            env: An environment's id, an `EnvSpec`, a factory, a sequence of factories (exactly `SyncVectorEnv`'s first
                argument; they may differ), or a `NativeVector`.
            num_envs: How many environments; 1 by default, or as many as there are factories.
            num_workers: How many processes share the environments out; by default one per usable core, at
            most `num_envs`.
                0 runs everything in this very process: for breakpoints, and for environments so cheap
                that nothing is won.
            launcher: Where workers are started; by default as children of this process.
            transport: "auto" uses shared memory for every worker that can reach it and ZeroMQ for the others; "shm" and
                "zmq" insist on one.
            autoreset_mode: What happens when an episode ends, as in Gymnasium.
            observation_mode: How observation spaces are batched, as in Gymnasium.
            copy: Whether `reset` and `step` return observations of the caller's own. False saves the
            copy, and the arrays
                change with the next step.
            env_kwargs: Arguments for `gymnasium.make`, with an id or a spec.
            timeouts: How long to wait for workers to join, answer and end.

        Raises:
            ConfigError: An argument is wrong, or a factory cannot be sent to a worker.
            LaunchError: Workers did not start.
            WorkerFailed: An environment could not be made on its worker.
        """
        super().__init__()
        factories = resolve(env, num_envs, env_kwargs)
        if transport not in _TRANSPORTS:
            raise ConfigError(f"transport must be one of {', '.join(_TRANSPORTS)}, got {transport!r}.")
        if transport == "shm" and not semaphore.IS_SUPPORTED:
            raise ConfigError("transport='shm' needs Linux; use 'auto' or 'zmq' here.")
        self.num_envs = factories.num_envs
        self.num_workers = _count_workers(num_workers, self.num_envs)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.observation_mode = observation_mode
        self.copy = copy
        self.spec = factories.spec
        self._pending: str | None = None
        self._backend: Hub | Inline
        if self.num_workers == 0:
            self._adopt(take_sample(factories, observation_mode))
            self._planes = Planes.allocate(self._action_layout, self._observation_layout, self.num_envs)
            self._backend = Inline(
                make_host(self._assignment(factories, 0, self.num_envs, []), self._planes), self._planes
            )
        else:
            self._backend = self._start_workers(
                factories, launcher or LocalLauncher(), transport, timeouts or Timeouts()
            )
        self._actions = ActionWriter(self.action_space, self._action_layout, self._planes.actions, self.num_envs)
        self._finalizer = weakref.finalize(self, self._backend.close)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The workers' process ids, in the order of the environments they host."""
        return self._backend.pids

    @property  # type: ignore[misc]  # read-only, as SyncVectorEnv has it
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # as SyncVectorEnv has it
        """The environments' random generators (copies, where they live on workers)."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as SyncVectorEnv has it
        """The seeds of the environments' random generators."""
        return self.get_attr("np_random_seed")

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those that `options["reset_mask"]` names.

        Args:
            seed: An int gives environment i the seed `seed + i`; a list has one for each.
            options: Passed to every environment, without the mask.

        Returns:
            The observations of all environments, and the infos of those that were reset.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a reset; `reset_wait` brings its results."""
        self._check_idle("reset_async")
        seeds = _spread_seed(seed, self.num_envs)
        mask = None
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options["reset_mask"], self.num_envs).tolist()
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        self._backend.reset(seeds, mask, options)
        self._pending = "reset"

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset under way, at most `timeout` seconds."""
        outcome = self._finish("reset", timeout)
        return self._observations(outcome), outcome.infos

    def step(self, actions: Any) -> Stepped:
        """Step every environment once.

        Rows are ordered by environment index, whichever worker answered first.

        Args:
            actions: One action per environment, shape `(num_envs, *action_shape)`, or a sequence of single actions.

        Raises:
            WorkerFailed: An environment raised.
            WorkerLost: A worker died.
            CallTimeout: A worker did not answer in time.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Start a step; `step_wait` brings its results."""
        self._check_idle("step_async")
        self._backend.step(self._actions.place(actions))
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Wait for the step under way, at most `timeout` seconds."""
        outcome = self._finish("step", timeout)
        planes = self._planes
        return (
            self._observations(outcome),
            planes.rewards.copy(),
            planes.terminations.copy(),
            planes.truncations.copy(),
            outcome.infos,
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or read an attribute, of every environment, looking through its wrappers."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start a call; `call_wait` brings its results."""
        self._check_idle("call_async")
        if name in _REFUSED_CALLS:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._backend.invoke(name, args, kwargs)
        self._pending = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call under way, at most `timeout` seconds; one result an environment."""
        return tuple(self._finish("call", timeout).results)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment.

        Args:
            name: The attribute; the outermost wrapper that has it is changed.
            values: A list or tuple with a value for each environment, or one value for all.
        """
        self._check_idle("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._backend.set_attr(name, values)
        self._pending = "set_attr"
        self._finish("set_attr", None)

    def render(self) -> tuple[Any, ...]:
        """Return what every environment renders."""
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers and leave nothing behind.

        Args:
            timeout: How many seconds workers get to close their environments before they are killed;
            `Timeouts.close_s` by
                default.
            terminate: Do not wait for them at all.
        """
        if self._finalizer.detach() is not None:
            self._backend.close(timeout, terminate=terminate)

    def __enter__(self) -> Self:
        """Return the environment itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _adopt(self, sample: Sample) -> None:
        self.metadata = {**sample.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = sample.render_mode
        self.single_observation_space = sample.single_observation_space
        self.observation_space = sample.observation_space
        self.single_action_space = sample.single_action_space
        self.action_space = sample.action_space
        self._observation_layout = Layout(self.single_observation_space)
        self._action_layout = Layout(self.single_action_space)

    def _assignment(self, factories: Factories, start: int, stop: int, registry: list[bytes]) -> Assignment:
        return Assignment(
            factories=factories.for_shard(start, stop),
            registry=registry,
            autoreset_mode=self.autoreset_mode,
            observation_space=self.single_observation_space,
            action_space=self.single_action_space,
            must_equal=self.observation_mode == "same",
            num_envs=self.num_envs,
            num_workers=self.num_workers,
        )

    def _start_workers(self, factories: Factories, launcher: Launcher, transport: str, timeouts: Timeouts) -> Hub:
        """Start workers, and look at a sample environment while they are coming up."""
        socket = HeadSocket()
        try:
            fleet = launcher.launch(socket.ticket, self.num_workers)
        except BaseException:
            socket.close()
            raise
        hub = Hub(socket, fleet, split_shards(self.num_envs, self.num_workers), timeouts)
        try:
            self._adopt(take_sample(factories, self.observation_mode))
            registry = local_registry()
            shards = {
                start: pickle_code(
                    self._assignment(factories, start, stop, registry), f"The factory of environment {start}"
                )
                for start, stop in split_shards(self.num_envs, self.num_workers)
            }
            hub.gather_workers()
            nonce, segment = make_nonce(), None
            if transport != "zmq" and semaphore.IS_SUPPORTED:
                size = Planes.size_bytes(self._action_layout, self._observation_layout, self.num_envs)
                segment = Segment.create(nonce, self.num_workers, size)
                self._planes = Planes.over(
                    segment.planes_memory, self._action_layout, self._observation_layout, self.num_envs
                )
            else:
                self._planes = Planes.allocate(self._action_layout, self._observation_layout, self.num_envs)
            hub.assign(self._planes, segment, lambda start, _: shards[start], nonce)
        except BaseException:
            hub.close(terminate=True)
            raise
        return hub

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self._pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._pending}` to complete.", self._pending
            )

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _finish(self, name: str, timeout: float | None) -> Outcome:
        self._check_open()
        if self._pending != name:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        try:
            outcome = self._backend.finish(timeout)
        except TimeoutError:
            raise  # Still pending: the same wait may be tried again.
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return outcome

    def _observations(self, outcome: Outcome) -> Any:
        planes = self._planes.observations
        if self._observation_layout.is_single:
            plane = planes[0]
            assert plane is not None
            return plane.copy() if self.copy else plane
        objects = iter(outcome.columns)
        return self._observation_layout.nest(
            [tuple(next(objects)) if plane is None else plane.copy() if self.copy else plane for plane in planes]
        )


def _count_workers(num_workers: int | None, num_envs: int) -> int:
    if num_workers is None:
        return min(usable_cores(), num_envs)
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ConfigError(f"num_workers must be an int of at least 0, got {num_workers!r}.")
    if num_workers > num_envs:
        raise ConfigError(f"num_workers={num_workers}, but there are only {num_envs} environments to share out.")
    return num_workers


def _spread_seed(seed: int | list[int | None] | None, num_envs: int) -> list[int | None]:
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + index for index in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    return [None if item is None else int(item) for item in seed]


def _checked_mask(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    """Check a reset mask, in Gymnasium's words."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not np.any(mask):
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask
