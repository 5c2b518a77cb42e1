"""ClusterEnv: many environments on many workers, and to the learner one `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from clusterenv.actions import ActionWriter, is_batch
from clusterenv.adapters import as_policy
from clusterenv.config import Timeouts
from clusterenv.errors import ConfigError
from clusterenv.factories import EnvArgument, resolve
from clusterenv.head.conductor import Conductor
from clusterenv.head.crew import Loss
from clusterenv.head.outcome import Outcome
from clusterenv.head.remote import Remote
from clusterenv.inline import Inline
from clusterenv.launchers.base import Launcher
from clusterenv.launchers.local import LocalLauncher
from clusterenv.plan import Plan
from clusterenv.policy.policy import Policy
from clusterenv.policy.sync import AdaptiveSync, SyncRule
from clusterenv.resets import checked_mask, spread_seed
from clusterenv.rollout import Rollout
from clusterenv.sample import ObservationMode, Sample, take_sample
from clusterenv.start import Options, count_workers, start_workers
from clusterenv.wire.layout import Layout

Stepped = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

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
        sync: SyncRule | None = None,
        on_loss: str = "replace",
        timeouts: Timeouts | None = None,
        listen: str | None = None,
        advertise: str | None = None,
    ) -> None:
        """Start the workers and make the environments; returns when all are ready.

        Args:
            env: An environment's id, an `EnvSpec`, a factory, a sequence of factories (exactly `SyncVectorEnv`'s first
                argument; they may differ), or a `NativeVector`.
            num_envs: How many environments; 1 by default, or as many as there are factories.
            num_workers: How many processes share the environments out; by default as many as the launcher is for, or
                one per usable core, at most `num_envs`. 0 runs everything in this very process: for breakpoints, and
                for environments so cheap that nothing is won.
            launcher: Where workers are started; by default as children of this process.
            transport: "auto" uses shared memory for every worker that can reach it and ZeroMQ for the others; "shm" and
                "zmq" insist on one.
            autoreset_mode: What happens when an episode ends, as in Gymnasium.
            observation_mode: How observation spaces are batched, as in Gymnasium.
            copy: Whether `reset` and `step` return observations of the caller's own. False saves the copy, and the
                arrays change with the next step.
            env_kwargs: Arguments for `gymnasium.make`, with an id or a spec.
            sync: When a policy on the workers takes the learner's newest weights; `AdaptiveSync()` by default.
            on_loss: What happens when a worker dies, hangs or vanishes. "replace" starts a new one and makes its
                environments again: `step` returns their rows truncated, with `info["worker_lost"]`, and `rollout`
                collects them anew. "raise" raises WorkerLost.
            timeouts: How long to wait for workers to join, answer and end.
            listen: The head's own address for workers to come in by, "HOST" or "HOST:PORT"; by default the one that
                routes to the launcher's hosts (this machine's loopback for local workers), and a random port.
            advertise: What workers are told, if it differs: behind a NAT, or with a forwarded port.

        Raises:
            ConfigError: An argument is wrong, or a factory cannot be sent to a worker.
            LaunchError: Workers did not start.
            WorkerFailed: An environment could not be made on its worker.
        """
        super().__init__()
        factories = resolve(env, num_envs, env_kwargs)
        options = Options(
            transport=transport,
            listen=listen,
            advertise=advertise,
            on_loss=on_loss,
            timeouts=timeouts or Timeouts(),
        )
        self.num_envs = factories.num_envs
        launcher = launcher or LocalLauncher()
        self.num_workers = count_workers(num_workers, self.num_envs, launcher)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.observation_mode = observation_mode
        self.copy = copy
        self.spec = factories.spec
        self._pending: str | None = None
        self._was_reset = False

        def make_plan() -> Plan:
            return Plan(
                factories=factories,
                sample=take_sample(factories, observation_mode, keeps=self.num_workers == 0),
                autoreset_mode=self.autoreset_mode,
                must_equal=observation_mode == "same",
                num_workers=self.num_workers,
            )

        self._backend: Remote | Inline
        if self.num_workers == 0:
            plan = make_plan()
            self._backend = Inline(plan.assignment(0, self.num_envs))
        else:
            self._backend, plan = start_workers(launcher, self.num_envs, self.num_workers, options, make_plan)
        self._adopt(plan.sample)
        self._planes = self._backend.planes
        self._actions = ActionWriter(self.action_space, self._action_layout, self._planes.actions, self.num_envs)
        self._conductor = Conductor(
            self._backend,
            sync or AdaptiveSync(),
            (self._action_layout, self._observation_layout),
            self.autoreset_mode,
            copies=copy,
        )
        self._agent: tuple[object, Policy] | None = None
        self._finalizer = weakref.finalize(self, self._backend.close)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The workers' process ids, in the order of the environments they host."""
        return self._backend.pids

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The workers that were lost and replaced, with the seeds their environments were reset with."""
        return tuple(self._backend.losses)

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
        seeds = spread_seed(seed, self.num_envs)
        mask = None
        if options is not None and "reset_mask" in options:
            mask = checked_mask(options["reset_mask"], self.num_envs).tolist()
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        self._backend.reset(seeds, mask, options)
        self._pending = "reset"

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset under way, at most `timeout` seconds."""
        outcome = self._finish("reset", timeout)
        self._was_reset = True
        self._conductor.note_reset()
        return self._observations(outcome), outcome.infos

    def step(self, actions: Any, **values: Any) -> Stepped:
        """Step every environment once.

        Rows are ordered by environment index, whichever worker answered first.

        Args:
            actions: One action per environment, shape `(num_envs, *action_shape)`, or a sequence of
            single actions. Or an
                agent: then the workers choose the actions, and the info holds "action", whatever else
                the policy returns ("logprob", "value", ...) and "policy_version".
            values: With an agent: per-call values for its policy, such as epsilon.

        Raises:
            WorkerFailed: An environment raised.
            WorkerLost: A worker died.
            CallTimeout: A worker did not answer in time.
        """
        self.step_async(actions, **values)
        return self.step_wait()

    def step_async(self, actions: Any, **values: Any) -> None:
        """Start a step; `step_wait` brings its results."""
        if self._pending is not None or self.closed:
            self._check_idle("step_async")
        if type(actions) is np.ndarray or is_batch(actions):
            if values:
                raise TypeError(f"Per-call values ({', '.join(values)}) go with an agent, not with actions.")
            self._backend.step(self._actions.place(actions))
        else:
            policy = self._policy_of(actions)
            self._ensure_reset()
            self._conductor.start_step(policy, values)
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Wait for the step under way, at most `timeout` seconds."""
        outcome = self._finish("step", timeout)
        self._conductor.note_step()
        planes = self._planes
        return (
            self._observations(outcome),
            planes.rewards.copy(),
            planes.terminations.copy(),
            planes.truncations.copy(),
            outcome.infos,
        )

    def rollout(self, agent: Any, num_steps: int, **values: Any) -> Rollout:
        """Let the workers step every environment `num_steps` times, with actions the agent's policy chooses there.

        New weights of the agent are noticed by themselves, and travel to a worker when the sync rule says so.
        Episodes go on from one rollout to the next; environments that were never reset are reset first,
        without a seed.

        Args:
            agent: A torch module, a `Policy`, or a function from observations to actions.
            num_steps: T.
            values: Per-call values for the policy, such as epsilon.

        Raises:
            PolicyError: The agent cannot be read as a policy, or its actions do not fit the action space.
            WorkerFailed: An environment or the policy raised on a worker.
        """
        self._check_idle("rollout")
        if num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, got {num_steps}.")
        policy = self._policy_of(agent)
        self._ensure_reset()
        return self._conductor.rollout(policy, num_steps, values)

    def publish(self, agent: Any) -> None:
        """Say that the agent's weights have changed, where that cannot be noticed: they become the next version."""
        self._policy_of(agent)
        self._conductor.publish()

    @property
    def stats(self) -> dict[str, Any]:
        """What the run has done and what it has cost, as a plain mapping: steps, pulls, bytes by kind, idle time."""
        return self._conductor.ledger.report(self.num_workers)

    def summary(self) -> str:
        """Say in a sentence what was done, and what the sync rule saved against pulling every version."""
        return self._conductor.ledger.summary()

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
        self._backend.finish()

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

    def _policy_of(self, agent: object) -> Policy:
        """Return the agent as a policy: the same one as long as it is the same agent."""
        if self._agent is None or self._agent[0] is not agent:
            self._agent = agent, as_policy(agent)
        return self._agent[1]

    def _ensure_reset(self) -> None:
        if not self._was_reset:
            self.reset()

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
        if self.closed or self._pending != name:
            self._check_open()
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
