"""BackedVectorEnv: offers a backend's environments through exactly Gymnasium's vector API."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from clusterenv.actions import ActionWriter
from clusterenv.errors import CallTimeout
from clusterenv.head.outcome import Outcome
from clusterenv.head.remote import Remote
from clusterenv.ownership import Ownership
from clusterenv.resets import checked_mask, spread_seed
from clusterenv.setup.sample import Sample
from clusterenv.wire.layout import Layout

if TYPE_CHECKING:
    from clusterenv.inline import Inline

StepResult = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_REFUSED_CALLS = ("reset", "step", "close", "_setattr", "_check_spaces")


class BackedVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """Resets, steps and calls the environments of a backend."""

    autoreset_mode: AutoresetMode
    copy: bool

    def _serve(self, backend: Remote | Inline, sample: Sample) -> None:
        """Take charge of a backend, whose environments the sample describes."""
        self._end_with(backend)
        self.metadata = {**sample.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = sample.render_mode
        self.single_observation_space = sample.single_observation_space
        self.observation_space = sample.observation_space
        self.single_action_space = sample.single_action_space
        self.action_space = sample.action_space
        self._observation_layout = Layout(self.single_observation_space)
        self._action_layout = Layout(self.single_action_space)
        self._backend = backend
        self._actions = ActionWriter(self.action_space, self._action_layout, backend.buffers[0].actions, self.num_envs)
        self._pending: tuple[str, Any] | None = None  # The call under way: its name, and its handle.
        self._was_reset = False
        self._owner = Ownership()

    def _end_with(self, backend: Remote | Inline) -> None:
        """Make sure that a backend is closed when this object is gone, even if its construction failed."""
        if "_finalizer" not in vars(self):
            self._finalizer = weakref.finalize(self, backend.close)

    @property  # type: ignore[misc]  # read-only, as SyncVectorEnv has it
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # as SyncVectorEnv has it
        """The environments' random generators (copies, if the environments are on workers)."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as SyncVectorEnv has it
        """The seeds of the environments' random generators."""
        return self.get_attr("np_random_seed")

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]`.

        Args:
            seed: An int gives environment i the seed `seed + i`; a list has one seed per environment.
            options: Passed to every environment, without the mask.

        Returns:
            The observations of all environments, and the infos of those that were reset.
        """
        with self._owner:
            before = self._pending
            try:
                self.reset_async(seed=seed, options=options)
                return self.reset_wait()
            except BaseException:
                self._pending = before  # Nobody waits for the call that was begun here.
                raise

    def reset_async(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a reset; `reset_wait` returns its results."""
        with self._owner:
            self._check_idle("reset_async")
            seeds = spread_seed(seed, self.num_envs)
            mask = None
            if options is not None and not isinstance(options, Mapping):
                raise TypeError(f"options must be a dict, which every environment's reset() is given, got {options!r}.")
            if options is not None and "reset_mask" in options:
                mask = checked_mask(options["reset_mask"], self.num_envs).tolist()
                options = {key: value for key, value in options.items() if key != "reset_mask"}
            self._pending = "reset", self._backend.reset(seeds, mask, options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset under way, at most `timeout` seconds."""
        with self._owner:
            outcome = self._finish("reset", timeout)
            self._was_reset = True
            self._backend.note_reset()
            self._note_reset(outcome)
            return self._observations(outcome), outcome.infos

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for the step under way, at most `timeout` seconds."""
        with self._owner:
            return self._step_wait(timeout)

    def _step_wait(self, timeout: float | None) -> StepResult:
        outcome = self._finish("step", timeout)
        self._note_step(outcome)
        newest = self._backend.newest
        return (
            self._observations(outcome),
            newest.rewards.copy(),
            newest.terminations.copy(),
            newest.truncations.copy(),
            outcome.infos,
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or read an attribute, of every environment, looking through its wrappers."""
        with self._owner:
            before = self._pending
            try:
                self.call_async(name, *args, **kwargs)
                return self.call_wait()
            except BaseException:
                self._pending = before
                raise

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start a call; `call_wait` returns its results."""
        with self._owner:
            self._check_idle("call_async")
            if name in _REFUSED_CALLS:
                raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
            self._pending = "call", self._backend.invoke(name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call under way, at most `timeout` seconds; returns one result per environment."""
        with self._owner:
            return tuple(self._finish("call", timeout).results)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment.

        Args:
            name: The attribute; it is set on the outermost wrapper that has it.
            values: A list or tuple with one value per environment, or one value for all.
        """
        with self._owner:
            self._check_idle("set_attr")
            if not isinstance(values, list | tuple):
                values = [values] * self.num_envs
            if len(values) != self.num_envs:
                raise ValueError(
                    "Values must be a list or tuple with length equal to the number of environments. "
                    f"Got `{len(values)}` values for {self.num_envs} environments."
                )
            handle: Any = self._backend.set_attr(name, values)
            self._backend.finish(handle)

    def apply(self, function: Callable[[Any], Any], indices: Sequence[int]) -> tuple[Any, ...]:
        """Run a function on the environments with these indices, on their workers; returns one result per index."""
        with self._owner:
            self._check_idle("apply")
            indices = [range(self.num_envs)[index] for index in indices]  # Negative ones count from the end.
            chosen = sorted(set(indices))
            handle: Any = self._backend.apply(function, chosen)
            outcome = self._backend.finish(handle)
            results = dict(zip(chosen, outcome.results, strict=True))
            return tuple(results[index] for index in indices)

    def render(self) -> tuple[Any, ...]:
        """Return every environment's `render()` result."""
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers and leave nothing behind.

        Args:
            timeout: How many seconds workers have to close their environments before they are killed.
            terminate: Whether to kill workers without waiting.
        """
        if not self._owner.is_here:
            return  # A forked copy of the head must not end its parent's workers.
        with self._owner:
            if self._pending is not None:
                logger.warn(f"Calling `close` while waiting for a pending call to `{self._pending[0]}` to complete.")
                self._pending = None
            self._backend.close(timeout, terminate=terminate)
            self._finalizer.detach()  # Last, so that after an interrupt the finalizer still closes the backend.

    def __enter__(self) -> Self:
        """Return the environment itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the environment."""
        self.close()

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self._pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._pending[0]}` to complete.",
                self._pending[0],
            )

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _finish(self, name: str, timeout: float | None) -> Outcome:
        pending = self._pending
        if self.closed or pending is None or pending[0] != name:
            self._check_open()
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        self._pending = None
        try:
            return self._backend.finish(pending[1], timeout)
        except CallTimeout:
            self._pending = pending  # The caller may wait again.
            raise

    def _note_step(self, outcome: Outcome) -> None:
        """Note that a step is done."""

    def _note_reset(self, outcome: Outcome) -> None:
        """Note that a reset is done."""

    def _observations(self, outcome: Outcome) -> Any:
        arrays = self._backend.newest.observations
        if self._observation_layout.is_single:
            array = arrays[0]
            assert array is not None
            return array.copy() if self.copy else array
        objects = iter(outcome.columns)
        return self._observation_layout.nest(
            [tuple(next(objects)) if array is None else array.copy() if self.copy else array for array in arrays]
        )
