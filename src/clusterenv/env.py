"""ClusterEnv: many environments on many workers, used by the learner as one `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.actions import is_batch
from clusterenv.adapters import as_separate_policy, as_travelling_policy
from clusterenv.config import Faults, Network, Timeouts, whole_number
from clusterenv.errors import CallTimeout, ConfigError, RecordingError, WorkerLost
from clusterenv.head.exchange import Exchange
from clusterenv.head.outcome import Outcome
from clusterenv.head.remote import Remote
from clusterenv.head.rollouts import Rollouts
from clusterenv.head.stream import Flow, Stream, StreamWish
from clusterenv.head.supervisor import Loss
from clusterenv.head.worker import Worker
from clusterenv.launchers.base import Launcher
from clusterenv.launchers.local import LocalLauncher
from clusterenv.policy.contents import announce
from clusterenv.policy.policy import Policy
from clusterenv.policy.sync import EveryUpdate, SyncRule
from clusterenv.rollout import Episodes, Rollout
from clusterenv.setup.arguments import as_autoreset_mode, check_launcher, check_mapping, check_settings, check_sync
from clusterenv.setup.factories import EnvArgument, describe_factory, resolve
from clusterenv.setup.sample import ObservationMode, check_mode, make_sample
from clusterenv.setup.start import count_workers, make_assignment, start_workers
from clusterenv.setup.wrapping import EnvWrapper
from clusterenv.vector import BackedVectorEnv, StepResult
from clusterenv.wire.buffers import check_collectable

if TYPE_CHECKING:  # Imported on use: only num_workers=0 needs the worker's code, and only evaluate() the evaluation's.
    from clusterenv.evaluation.evaluate import Scene
    from clusterenv.evaluation.result import Evaluation
    from clusterenv.inline import Inline, InlineStream

_FAULTS, _NETWORK, _TIMEOUTS = Faults(), Network(), Timeouts()
_VALUES = '{"epsilon": 0.1}'


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """What the head knows about a worker.

    Attributes:
        pid: The process id on the worker's own machine; None before the worker has joined.
        host: The name of that machine.
        state: "starting", "preparing", "ready", "lost", "late" if the run began without it, or "closed".
        environments: The indices of the environments it hosts.
        version: The version of the policy's weights it holds; 0 if it holds none.
        losses: The earlier workers at this index that were lost and replaced.
    """

    index: int
    pid: int | None
    host: str
    state: str
    environments: tuple[int, ...]
    version: int
    losses: tuple[Loss, ...]


class ClusterEnv(BackedVectorEnv):
    """Runs environments on worker processes and steps them as one vector environment.

    Given the same factories, seeds and actions, the results equal those of `gymnasium.vector.SyncVectorEnv` bit for
    bit, regardless of the number of workers.
    """

    _stream: Flow | InlineStream | None = None

    def __init__(
        self,
        env: EnvArgument,
        num_envs: int | None = None,
        *,
        num_workers: int | None = None,
        launcher: Launcher | None = None,
        sync: SyncRule | None = None,
        autoreset_mode: str | AutoresetMode = "NextStep",
        observation_mode: ObservationMode = "same",
        copy: bool = True,
        env_kwargs: dict[str, Any] | None = None,
        render_mode: str | None = None,
        wrappers: Sequence[EnvWrapper] | None = None,
        faults: Faults = _FAULTS,
        network: Network = _NETWORK,
        timeouts: Timeouts = _TIMEOUTS,
    ) -> None:
        """Start the workers and make the environments; return when all are ready.

        Args:
            env: An environment id, an `EnvSpec`, a factory, a sequence of factories (as for `SyncVectorEnv`; they may
                differ), or a `NativeVector`.
            num_envs: The number of environments; by default 1, or the number of factories.
            num_workers: The number of processes the environments are divided among; by default the launcher's
                suggestion, or one per usable core, at most `num_envs`. 0 runs everything in this process: useful for
                breakpoints, and for environments so cheap that workers gain nothing.
            launcher: Where workers are started; by default as children of this process.
            sync: When workers pull the learner's newest weights. The default, `EveryUpdate()`, makes each rollout with
                the newest; `AdaptiveSync(0.05)` saves most of that traffic.
            autoreset_mode: What happens when an episode ends, as in Gymnasium.
            observation_mode: How observation spaces are batched, as in Gymnasium.
            copy: Whether `reset` and `step` return copies of the observations. False saves the copy, but the arrays
                are then overwritten by the step after the next, or immediately by a reset or a rollout.
            env_kwargs: Arguments for `gymnasium.make`, if `env` is an id or a spec.
            render_mode: The environments' render mode, if `env` is an id or a spec; with "rgb_array", `render` returns
                their images.
            wrappers: Functions from one environment to another, such as Gymnasium's wrapper classes, applied to each
                environment on its worker; the first is innermost.
            faults: What happens when a worker is lost or an environment raises.
            network: How workers reach the head.
            timeouts: How long to wait for workers to join, answer and exit.

        Raises:
            ConfigError: An argument is wrong, or a factory cannot be sent to a worker.
            LaunchError: Workers did not start.
            WorkerFailed: An environment could not be made on its worker.
        """
        super().__init__()
        factories = resolve(env, num_envs, env_kwargs, render_mode, wrappers)
        check_settings(faults=faults, network=network, timeouts=timeouts)
        check_launcher(launcher)
        check_sync(sync)
        check_mode(observation_mode)
        if not isinstance(copy, bool):
            raise ConfigError(f"copy must be True or False, got {copy!r}.")
        self.num_envs = factories.num_envs
        launcher = launcher or LocalLauncher()
        self.num_workers = count_workers(num_workers, self.num_envs, launcher)
        if (faults.min_workers or 0) > self.num_workers:
            raise ConfigError(f"Faults.min_workers={faults.min_workers}, but num_workers={self.num_workers}.")
        self.autoreset_mode = as_autoreset_mode(autoreset_mode)
        self.observation_mode = observation_mode
        self.copy = copy
        self.spec = factories.spec
        self._factories = factories
        self._launcher = launcher

        backend: Remote | Inline
        if self.num_workers == 0:
            from clusterenv.inline import Inline

            shard = 0, self.num_envs
            inline = Inline(make_assignment(factories, shard, self.autoreset_mode, faults.on_env_error, []))
            own = inline.description
            sample = make_sample([(self.num_envs, own)], observation_mode, self.num_envs, lambda: own)
            inline.open(sample.run_spaces)
            backend = inline
        else:
            backend, sample = start_workers(
                launcher,
                factories,
                self.num_workers,
                mode=self.autoreset_mode,
                observation_mode=observation_mode,
                faults=faults,
                network=network,
                timeouts=timeouts,
                on_start=self._end_with,
            )
        self._serve(backend, sample)
        layouts = self._action_layout, self._observation_layout
        self._rollouts = Rollouts(backend, sync or EveryUpdate(), layouts, self.autoreset_mode, copies=copy)
        if isinstance(backend, Remote):
            backend.preparation.on_adopted = self._rollouts.versions.note_adopted
            backend.preparation.weights_now = self._rollouts.versions.offer_newest
            backend.on_missing = self._rollouts.versions.note_missing
        self._exchange = Exchange(backend, *layouts)
        self._is_agents_step = False  # Whether the workers choose the actions of the pending step.
        self._is_exchanging = False  # Whether `send` or `recv` may have left something behind.
        self._agent: tuple[object, tuple[str, ...] | None, Policy] | None = None
        self._are_alike = False  # Whether it is known that the environments are all of one kind.
        self._recorder: weakref.ref[object] | None = None  # The Recorder that the workers record for.

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The workers' process ids, in the order of the environments they host."""
        return tuple(worker.pid or 0 for worker in self._workers)

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """What the head knows about each worker now, in the order of the environments they host."""
        return tuple(
            WorkerStatus(
                index=worker.index,
                pid=worker.pid,
                host=worker.hostname,
                state="closed" if self.closed else worker.state.value,
                environments=worker.env_indices,
                version=worker.policy.version,
                losses=tuple(loss for loss in self._backend.losses if loss.worker_index == worker.index),
            )
            for worker in self._workers
        )

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The workers that were lost and replaced, with the seeds their environments were reset with."""
        return tuple(self._backend.losses)

    def step(self, actions: Any, *, values: Mapping[str, Any] | None = None) -> StepResult:
        """Step every environment once.

        Rows are ordered by environment index, whichever worker answered first.

        Args:
            actions: One action per environment, shape `(num_envs, *action_shape)`, or a sequence of single actions. Or
                an agent: the workers then choose the actions, and the info holds "action", "policy_version" and
                whatever else the policy returns ("logprob", "value", ...).
            values: Per-call values for the agent's policy, such as `{"epsilon": 0.1}`; only with an agent.

        Raises:
            WorkerFailed: An environment raised.
            WorkerLost: A worker died.
        """
        with self._owner:
            before = self._pending
            try:
                self._start_step(actions, values)
                return self._step_wait(None)
            except BaseException:
                self._pending = before  # Nobody will wait for the step that was started here.
                raise

    def reset_async(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a reset; `reset_wait` returns its results."""
        with self._owner:
            super().reset_async(seed, options)

    def step_async(self, actions: Any, *, values: Mapping[str, Any] | None = None) -> None:
        """Start a step; `step_wait` returns its results."""
        with self._owner:
            self._start_step(actions, values)

    def _start_step(self, actions: Any, values: Mapping[str, Any] | None) -> None:
        if self._pending is not None or self._stream is not None or self._is_exchanging or self.closed:
            self._check_idle("step_async")
        if isinstance(actions, np.ndarray) or is_batch(actions):
            if values:
                raise TypeError("values= are passed to an agent's policy and cannot be combined with actions.")
            self._is_agents_step = False
            self._pending = "step", self._backend.step(self._actions.place(actions))
        else:
            self._check_idle("step_async")
            check_mapping("values", values, _VALUES)
            policy = self._policy_of(actions)
            self._ensure_reset()
            self._pending = "step", self._rollouts.start_step(policy, dict(values or {}))
            self._is_agents_step = True

    def rollout(
        self,
        agent: Any,
        num_steps: int,
        *,
        values: Mapping[str, Any] | None = None,
        extras: Sequence[str] | None = None,
    ) -> Rollout:
        """Step every environment `num_steps` times on the workers, where the agent's policy chooses the actions.

        The agent's new weights are noticed automatically, and sent to a worker when the sync rule says so. Episodes
        continue from one rollout to the next; environments that were never reset are reset first, without a seed.

        Args:
            agent: A torch module, a `Policy`, or a function from observations to actions.
            num_steps: The number of steps per environment, T.
            values: Per-call values for the policy, such as `{"epsilon": 0.1}`.
            extras: The names of the policy outputs to return besides actions, such as `("logprob",)`; by default all.
                Other outputs are not sent and, if the policy's structure is known, neither computed nor kept up to date
                on workers. Changing `extras` between calls sends the whole policy again.

        Raises:
            PolicyError: The agent cannot be read as a policy, or its actions do not fit the action space.
            WorkerFailed: An environment or the policy raised on a worker.
        """
        with self._owner:
            self._check_idle("rollout")
            num_steps = whole_number("num_steps", num_steps, least=1)
            check_mapping("values", values, _VALUES)
            policy = self._policy_of(agent, extras)
            self._ensure_reset()
            return self._rollouts.rollout(policy, num_steps, dict(values or {}))

    def stream(
        self,
        agent: Any,
        num_steps: int,
        *,
        min_envs: int = 1,
        in_flight: int = 2,
        max_lag: float | None = None,
        values: Mapping[str, Any] | None = None,
        extras: Sequence[str] | None = None,
    ) -> Stream | InlineStream:
        """Have the workers make rollouts continuously, delivered as they finish, while the caller learns from them.

        Iterate over the stream; used as a context manager, it ends with the block. The loop can be left and resumed
        later. Any other call on this object ends the stream; rollouts not yet delivered are then discarded, and
        counted in `stats`. The agent's new weights are noticed automatically whenever the next rollout is requested.

        Args:
            agent: As for `rollout`.
            num_steps: The number of steps of each rollout, T.
            min_envs: Merge rollouts until they cover at least this many environments. By default each worker's rollout
                is delivered separately. `Rollout.env_indices` gives the environment of each column.
            in_flight: How many rollouts a worker may be ahead of what was delivered. More keep it busy when learning
                takes long, but make its data older.
            max_lag: Discard, and count, rollouts whose policy is more than this many versions behind, and bring their
                worker up to date. The default is what the sync rule allows plus one rollout more per worker than may be
                in flight, which only a worker far slower than the others exceeds. `math.inf` delivers all.
            values: Per-call values for the policy; assign to `stream.values` to change them later.
            extras: As for `rollout`.

        Raises:
            PolicyError: The agent cannot be read as a policy, or its actions do not fit the action space.
            WorkerFailed: An environment or the policy raised on a worker.
        """
        with self._owner:
            self._check_idle("stream")
            check_mapping("values", values, _VALUES)
            values = dict(values or {})
            wish = StreamWish(
                num_steps=whole_number("num_steps", num_steps, least=1),
                min_envs=whole_number("min_envs", min_envs, least=1),
                in_flight=whole_number("in_flight", in_flight, least=1),
                max_lag=max_lag,
                values=values,
            )
            num_steps = wish.num_steps
            policy = self._policy_of(agent, extras)
            if min_envs > self.num_envs:
                raise ConfigError(f"min_envs={min_envs}, but there are only {self.num_envs} environments.")
            backend = self._backend
            if not isinstance(backend, Remote):
                from clusterenv.inline import InlineStream

                self._ensure_reset()
                self._stream = InlineStream(
                    lambda current: self._rollouts.rollout(policy, num_steps, current), values, self._owner
                )
                return self._stream
            check_collectable(*self._rollouts.layouts)
            with backend.without_late(), self._rollouts.distrust_after_failure():
                self._ensure_reset()
                backend.settle()
                pulls = self._rollouts.versions.prepare(policy, values)
                self._stream = flow = Flow(backend, self._rollouts, policy, wish, pulls, self._owner)
            return Stream(self, flow)

    def evaluate(
        self,
        agent: Any,
        episodes: int | None = None,
        *,
        seed: int | Sequence[int] = 0,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        max_steps: int | None = None,
        deterministic: bool = False,
        values: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> Evaluation:
        """Play a fixed set of whole episodes with the agent on the workers.

        Episode i is reset with the seed `seed + i`, and counts however long it takes. If its worker is lost, it is
        played again from that seed. The result does not depend on the number of workers or environments.

        Evaluations use their own environments, policy and random generators, so training continues afterwards as if
        there had been none. The environments are made like the run's first one, and kept for the next evaluation.

        Args:
            agent: As for `rollout`.
            episodes: The number of episodes; by default 100, or the number of seeds.
            seed: The seed of the first episode, or a list with one per episode.
            options: The options for `reset`: a dict for all episodes, or a list with one per episode.
            max_steps: Truncate episodes after this many steps. By default, more than 100,000 steps are an error.
            deterministic: Take each state's most likely action, or the mean, instead of sampling.
            values: Per-call values for the policy, such as `{"epsilon": 0.05}`.
            num_envs: How many environments to use at a time, over all workers; by default as many as the run has.
            resume: A file to which each episode is written when it ends. Episodes already in it are not played again.

        Raises:
            ConfigError: An argument is wrong, the file belongs to another evaluation, or an episode does not end.
            PolicyError: The agent cannot be read as a policy, or cannot act deterministically.
            WorkerFailed: An environment or the policy raised on a worker.
            JournalError: The file cannot be written.
        """
        from clusterenv.evaluation.evaluate import Wish, evaluate

        with self._owner:
            self._check_idle("evaluate")
            check_mapping("values", values, _VALUES)
            scene = self._scene()
            wish = Wish(
                episodes=episodes,
                seed=seed,
                options=options,
                max_steps=max_steps,
                deterministic=deterministic,
                values=dict(values or {}),
                num_envs=num_envs,
                resume=resume,
            )
            # A separate policy: the one for rollouts tracks which weights the workers hold.
            return evaluate(self._backend, scene, as_separate_policy(agent), agent, wish)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Stop the workers and leave nothing behind.

        Args:
            timeout: How many seconds workers have to close their environments before they are killed; by default
                `Timeouts.close_s`.
            terminate: Kill the workers without waiting.
        """
        if self._stream is not None and self._owner.is_here:
            self._stream.abandon()
        super().close_extras(timeout, terminate)

    def send(self, actions: Any, env_ids: Any) -> None:
        """Send actions to some environments; `recv` returns the results of whichever are ready first.

        A worker steps its environments once all of them have an action. This is for learners that choose actions on the
        head and do not want to wait for the slowest worker at every step.

        Args:
            actions: One per environment, in the order of `env_ids`. They are converted to the dtype of the action
                space; values that the conversion would change, such as 1.9 for a `Discrete`, are refused.
            env_ids: The indices of the environments.
        """
        with self._owner:
            if self._pending is None or self._pending[0] != "send":
                self._check_idle("send")
            with self._exchanging():
                self._exchange.send(actions, np.asarray(env_ids))

    def recv(self, timeout: float | None = None) -> StepResult:
        """Return step results for the environments that are ready, waiting for at least one worker.

        Row i belongs to environment `info["env_id"][i]`.
        """
        with self._owner:
            self._check_open()
            with self._exchanging():
                received, errors = self._exchange.recv(timeout)
            self._rollouts.note_step(len(received[1]), errors)
            return received

    def publish(self, agent: Any) -> None:
        """Announce that the agent's weights have changed, if that cannot be detected: they become the next version."""
        with self._owner:
            known = self._agent is not None and self._agent[0] is agent
            announce(self._policy_of(agent, self._agent[1] if known and self._agent is not None else None))
            self._rollouts.versions.tell()

    @property
    def stats(self) -> dict[str, Any]:
        """What the run has done and what it has cost, as a plain dict: steps, pulls, bytes by kind, idle time.

        `workers` is the number of workers now, `workers_mean` their average number since the run began, and
        `worker_hours` the total time they have existed.
        """
        backend = self._backend
        workers = backend.supervisor.attendance.report(time.monotonic()) if isinstance(backend, Remote) else {}
        return self._rollouts.stats.report(self.num_workers) | workers

    def summary(self) -> str:
        """Say in a sentence what was done, and what the sync rule saved compared to pulling every version."""
        return self._rollouts.stats.summary()

    @property
    def run_id(self) -> int:
        """The number that identifies this run; its rollouts hold it as `rollout.positions.run`."""
        return self._rollouts.run

    def _begin_recording(self, recorder: object, directory: str, about: Mapping[str, Any]) -> None:
        """Have every worker record the rollouts of `_record` in this directory on its own machine."""
        with self._owner:
            self._check_idle("Recorder")
            backend = self._backend
            if not isinstance(backend, Remote):
                raise ConfigError(
                    "where='worker' records on the workers' machines, and num_workers=0 has none: leave where= out."
                )
            if self._recorder is not None and self._recorder() is not None:
                raise ConfigError("The workers record for another Recorder already: close that one first.")
            self._recorder = weakref.ref(recorder)
            reasons = backend.finish(backend.record(directory, about)).results
            if failed := [each for each in zip(backend.workers, reasons, strict=True) if each[1] != ""]:
                self._end_recording()
                worker, reason = failed[0]
                raise ConfigError(f"{reason} (On {worker}.)")

    def _record(
        self, agent: Any, num_steps: int, values: Mapping[str, Any] | None, number: int
    ) -> tuple[Episodes, list[str], RecordingError | None]:
        """Make a rollout with the newest weights that the workers record and keep instead of sending it.

        Returns:
            The episodes that finished, the files that were written to, as `host:path`, and any failure to write.
        """
        with self._owner:
            self._check_idle("collect")
            num_steps = whole_number("num_steps", num_steps, least=1)
            check_mapping("values", values, _VALUES)
            policy = self._policy_of(agent)
            self._ensure_reset()
            episodes, records = self._rollouts.record(policy, num_steps, dict(values or {}), number)
            failure = None
            if failed := [(worker, reason) for worker, _, reason in records if reason]:
                worker, reason = failed[0]
                others = f" and {len(failed) - 1} others" if len(failed) > 1 else ""
                failure = RecordingError(
                    f"A rollout could not be recorded by {worker}{others}: {reason} Earlier rollouts, and those of "
                    "other workers, are unaffected; the run can continue, and later rollouts can be recorded."
                )
            return episodes, [f"{worker.hostname}:{path}" for worker, path, reason in records if not reason], failure

    def _end_recording(self) -> None:
        """Stop the workers from recording."""
        backend = self._backend
        if isinstance(backend, Remote) and not self.closed:
            with self._owner:
                self._check_idle("Recorder.close")
                backend.finish(backend.end_recording())
        self._recorder = None

    def _policy_of(self, agent: object, extras: Sequence[str] | None = None) -> Policy:
        """Return the agent as a policy: the same one as long as the agent and the extras are the same."""
        if isinstance(extras, str):
            raise ConfigError(f"extras must be a sequence of names, such as ({extras!r},), got the text {extras!r}.")
        wanted = None if extras is None else tuple(extras)
        if self._agent is None or self._agent[0] is not agent or self._agent[1] != wanted:
            self._agent = agent, wanted, as_travelling_policy(agent, wanted)
        return self._agent[2]

    def _scene(self) -> Scene:
        from clusterenv.evaluation.alike import check_alike
        from clusterenv.evaluation.evaluate import Scene

        if self._factories.plain is None:
            raise ConfigError(
                "evaluate() resets each environment for its own episode, which a NativeVector does not allow: make a "
                "ClusterEnv of single environments for evaluations, ClusterEnv('CartPole-v1', ...)."
            )
        if self.observation_mode == "different":
            raise ConfigError(
                "evaluate() needs environments that are all alike, and these have different observation spaces: make a "
                "ClusterEnv for each kind."
            )
        check_collectable(*self._rollouts.layouts)
        factory = self._factories.plain[0]
        if not self._are_alike:
            check_alike(self._factories.plain, lambda describe: self.apply(describe, range(self.num_envs)))
            self._are_alike = True
        return Scene(
            factory=factory,
            env_name=describe_factory(factory) if self.spec is None else self.spec.id,
            made_by=describe_factory(factory),
            observation_space=self.single_observation_space,
            action_space=self.single_action_space,
            num_envs=self.num_envs,
            num_workers=self.num_workers,
            launcher=type(self._launcher).__name__ if self.num_workers else "none: in the learner's own process",
        )

    def _ensure_reset(self) -> None:
        if not self._was_reset:
            self.reset()

    def _check_idle(self, name: str) -> None:
        if self._pending is not None and self._pending[0] == "send" and self._exchange.is_idle:
            self._pending = None
        super()._check_idle(name)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._is_exchanging and name != "send":
            self._exchange.forget()  # The exchange was interrupted.
            self._is_exchanging = False

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Note afterwards whether results are still pending. After Ctrl-C they may be, but any call is allowed."""
        self._is_exchanging = True
        try:
            yield
        except WorkerLost:
            self._exchange.forget()  # The loss is final: other calls raise WorkerLost, too.
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                self._pending = None
            raise
        self._pending = None if self._exchange.is_idle else ("send", None)
        self._is_exchanging = self._pending is not None

    def _finish(self, name: str, timeout: float | None) -> Outcome:
        try:
            return super()._finish(name, timeout)
        except CallTimeout:
            raise
        except BaseException:
            if self._is_agents_step:  # Nobody knows which weights the workers hold.
                self._rollouts.versions.forget_policy()
            raise

    def _note_step(self, outcome: Outcome) -> None:
        self._rollouts.note_step(self.num_envs, outcome.errors, outcome.probes)

    def _note_reset(self, outcome: Outcome) -> None:
        self._rollouts.note_errors(outcome.errors)

    @property
    def _workers(self) -> Sequence[Worker]:
        return self._backend.workers if self.num_workers else ()
