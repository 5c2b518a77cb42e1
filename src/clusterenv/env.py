"""ClusterEnv: many environments on many workers, and to the learner one `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.actions import is_batch
from clusterenv.adapters import as_policy
from clusterenv.config import Timeouts
from clusterenv.errors import ConfigError
from clusterenv.exchange import Exchange
from clusterenv.factories import EnvArgument, resolve
from clusterenv.head.conductor import Conductor
from clusterenv.head.crew import Loss
from clusterenv.head.remote import Remote
from clusterenv.head.stream import Stream, StreamWish
from clusterenv.launchers.base import Launcher
from clusterenv.launchers.local import LocalLauncher
from clusterenv.plan import Plan
from clusterenv.policy.policy import Policy
from clusterenv.policy.sync import AdaptiveSync, SyncRule
from clusterenv.rollout import Rollout
from clusterenv.sample import ObservationMode, take_sample
from clusterenv.start import Options, count_workers, start_workers
from clusterenv.vector import BackedVectorEnv, Stepped

if TYPE_CHECKING:  # Only who has no workers needs what workers are made of.
    from clusterenv.inline import Inline, InlineStream


class ClusterEnv(BackedVectorEnv):
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
        min_workers: int | None = None,
        on_env_error: str = "raise",
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
            min_workers: Begin when this many workers are there. `stream` uses those that are; the others take part as
                they come. All other calls wait for all.
            on_env_error: What happens when an environment raises. "raise" raises WorkerFailed. "reset" truncates its
                episode, with `info["env_error"]`, and goes on; see docs/reliability.md.
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
            min_workers=min_workers,
            on_env_error=on_env_error,
            timeouts=timeouts or Timeouts(),
        )
        self.num_envs = factories.num_envs
        launcher = launcher or LocalLauncher()
        self.num_workers = count_workers(num_workers, self.num_envs, launcher)
        if min_workers is not None and not 1 <= min_workers <= self.num_workers:
            raise ConfigError(f"min_workers must be 1 to num_workers={self.num_workers}, got {min_workers}.")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.observation_mode = observation_mode
        self.copy = copy
        self.spec = factories.spec

        def make_plan() -> Plan:
            return Plan(
                factories=factories,
                sample=take_sample(factories, observation_mode, keeps=self.num_workers == 0),
                autoreset_mode=self.autoreset_mode,
                must_equal=observation_mode == "same",
                num_workers=self.num_workers,
                on_env_error=on_env_error,
            )

        backend: Remote | Inline
        if self.num_workers == 0:
            from clusterenv.inline import Inline

            plan = make_plan()
            backend = Inline(plan.assignment(0, self.num_envs))
        else:
            backend, plan = start_workers(launcher, self.num_envs, self.num_workers, options, make_plan)
        self._serve(backend, plan.sample)
        self._conductor = Conductor(
            backend,
            sync or AdaptiveSync(),
            (self._action_layout, self._observation_layout),
            self.autoreset_mode,
            copies=copy,
        )
        self._exchange = Exchange(backend, self._action_layout, self._observation_layout)
        self._agent: tuple[object, Policy] | None = None
        self._stream: Stream | InlineStream | None = None

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The workers' process ids, in the order of the environments they host."""
        return self._backend.pids

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The workers that were lost and replaced, with the seeds their environments were reset with."""
        return tuple(self._backend.losses)

    def step(self, actions: Any, **values: Any) -> Stepped:
        """Step every environment once.

        Rows are ordered by environment index, whichever worker answered first.

        Args:
            actions: One action per environment, shape `(num_envs, *action_shape)`, or a sequence of single actions. Or
                an agent: then the workers choose the actions, and the info holds "action", whatever else the policy
                returns ("logprob", "value", ...) and "policy_version".
            values: With an agent: per-call values for its policy, such as epsilon.

        Raises:
            WorkerFailed: An environment raised.
            WorkerLost: A worker died.
            CallTimeout: A worker did not answer in time.
        """
        try:
            self.step_async(actions, **values)
            return self.step_wait()
        except KeyboardInterrupt:
            self._pending = None
            raise

    def step_async(self, actions: Any, **values: Any) -> None:
        """Start a step; `step_wait` brings its results."""
        if self._pending is not None or self._stream is not None or self.closed:
            self._check_idle("step_async")
        if isinstance(actions, np.ndarray) or is_batch(actions):
            if values:
                raise TypeError(f"Per-call values ({', '.join(values)}) go with an agent, not with actions.")
            self._backend.step(self._actions.place(actions))
            self._pending = "step"
        else:
            policy = self._policy_of(actions)
            self._ensure_reset()
            self._conductor.start_step(policy, values)
            self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Wait for the step under way, at most `timeout` seconds."""
        stepped = super().step_wait(timeout)
        self._conductor.note_step(stepped[4])
        return stepped

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset under way, at most `timeout` seconds."""
        reset = super().reset_wait(timeout)
        self._conductor.note_reset(reset[1])
        return reset

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

    def stream(
        self,
        agent: Any,
        num_steps: int,
        *,
        num_envs: int = 1,
        in_flight: int = 2,
        max_lag: float | None = None,
        **values: Any,
    ) -> Stream | InlineStream:
        """Let the workers keep making rollouts, and yield them as they are made, while the caller learns from them.

        Use it as an iterator; as a context manager it is ended at the end of the block. It can be left and taken up
        again. Any other call on this object ends it; rollouts that were not delivered are then thrown away, and
        counted in `stats`. New weights of the agent are noticed by themselves whenever the next rollout is asked for.

        Args:
            agent: As for `rollout`.
            num_steps: T of each rollout.
            num_envs: Gather the rollouts of at least so many environments into one. By default each worker's comes by
                itself. `Rollout.env_indices` says whose columns they are.
            in_flight: How many rollouts a worker may make ahead of what was delivered. More keep it busy when learning
                takes long, and make what it delivers older.
            max_lag: Throw away, and count, rollouts of a policy more than this many versions behind, and bring their
                worker up to date. By default what the sync rule allows, and a rollout more of every worker than may be
                in flight: only a worker that is far slower than the others exceeds that. `math.inf` delivers all.
            values: Per-call values for the policy; `stream.values` can be changed later.

        Raises:
            PolicyError: The agent cannot be read as a policy, or its actions do not fit the action space.
            WorkerFailed: An environment or the policy raised on a worker.
        """
        self._check_idle("stream")
        wish = StreamWish(num_steps=num_steps, num_envs=num_envs, in_flight=in_flight, max_lag=max_lag, values=values)
        policy = self._policy_of(agent)
        if num_envs > self.num_envs:
            raise ConfigError(f"num_envs={num_envs}, but there are only {self.num_envs} environments.")
        if not isinstance(self._backend, Remote):
            from clusterenv.inline import InlineStream

            self._ensure_reset()
            self._stream = InlineStream(lambda current: self._conductor.rollout(policy, num_steps, current), values)
        else:
            with self._backend.crew.without_late():
                self._ensure_reset()
                self._stream = self._conductor.stream(self._backend, policy, wish)
        return self._stream

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers and leave nothing behind.

        Args:
            timeout: How many seconds workers get to close their environments before they are killed;
                `Timeouts.close_s` by default.
            terminate: Do not wait for them at all.
        """
        if self._stream is not None:
            self._stream.abandon()
        super().close_extras(timeout, terminate)

    def send(self, actions: Any, env_ids: Any) -> None:
        """Give some environments their actions, for `recv` to bring the results of whichever are ready first.

        A worker steps its environments when all of them have an action. For learners that choose actions on the head
        and do not want to wait for the slowest worker at every step.

        Args:
            actions: One an environment, in the order of `env_ids`.
            env_ids: Which environments.
        """
        if self._pending != "send":
            self._check_idle("send")
        self._exchange.send(actions, np.asarray(env_ids))
        self._pending = None if self._exchange.is_idle else "send"

    def recv(self, timeout: float | None = None) -> Stepped:
        """Return what `step` does, for the environments that are ready, at least one worker's.

        Rows are in the order of `info["env_id"]`.
        """
        self._check_open()
        try:
            received = self._exchange.recv(timeout)
        finally:
            self._pending = None if self._exchange.is_idle else "send"
        self._conductor.note_step(received[4], received[4]["env_id"])
        return received

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

    def _policy_of(self, agent: object) -> Policy:
        """Return the agent as a policy: the same one as long as it is the same agent."""
        if self._agent is None or self._agent[0] is not agent:
            self._agent = agent, as_policy(agent)
        return self._agent[1]

    def _ensure_reset(self) -> None:
        if not self._was_reset:
            self.reset()

    def _check_idle(self, name: str) -> None:
        super()._check_idle(name)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
