"""Evaluate: turns a user's request into the table of episodes."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import numpy as np
from gymnasium import Space

from clusterenv.config import whole_number
from clusterenv.errors import ConfigError
from clusterenv.evaluation.digest import digest_of, digest_of_code
from clusterenv.evaluation.journal import Journal
from clusterenv.evaluation.manifest import describe_here
from clusterenv.evaluation.progress import Progress
from clusterenv.evaluation.result import Evaluation
from clusterenv.head.acting import pickle_arguments
from clusterenv.head.dealer import Dealer
from clusterenv.head.evaluating import Finished
from clusterenv.policy.contents import VALUES, Contents
from clusterenv.policy.policy import Policy
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire.assignment import EnvFactory, EvaluationPlan
from clusterenv.wire.layout import Layout
from clusterenv.wire.messages import Episode

log = logging.getLogger(__name__)

_DEFAULT_EPISODES = 100
_ENDLESS_STEPS = 100_000  # Without max_steps, a longer episode is assumed never to end.
_SHOWN_ROWS = 64  # How many observations are shown to a policy that wants to see some.
_SEED_LIMIT = 2**63


class PlayingBackend(Protocol):
    """Where episodes are played."""

    def play(
        self, plan: EvaluationPlan, episodes: Sequence[Episode], dealer: Dealer, num_envs: int
    ) -> Generator[list[Finished], None, None]:
        """Play until every episode is over; yield episodes as they finish."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The environments of an evaluation, and where they run.

    Attributes:
        factory: Makes one environment.
        env_name: The environment's name.
        made_by: A description that identifies the factory.
        observation_space: The observation space of one environment.
        action_space: The action space of one environment.
        num_envs: How many environments to use, unless the request says otherwise.
        num_workers: The number of workers.
        launcher: The name of their launcher.
    """

    factory: EnvFactory
    env_name: str
    made_by: str
    observation_space: Space[Any]
    action_space: Space[Any]
    num_envs: int
    num_workers: int
    launcher: str


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A user's request: the arguments of `ClusterEnv.evaluate`."""

    episodes: int | None
    seed: Any
    options: Any
    max_steps: int | None
    deterministic: bool
    values: Mapping[str, Any]
    num_envs: int | None
    resume: str | os.PathLike[str] | None


def evaluate(backend: PlayingBackend, scene: Scene, policy: Policy, agent: object, wish: Wish) -> Evaluation:
    """Play the episodes, and return their table.

    Args:
        backend: Where to play.
        scene: The environments.
        policy: The agent as a travelling policy that nobody else uses: it is shown observations.
        agent: The agent itself.
        wish: Which episodes to play, and how.
    """
    started, started_at = time.perf_counter(), datetime.now(UTC)
    if not isinstance(wish.deterministic, bool):
        raise ConfigError(f"deterministic must be True or False, got {wish.deterministic!r}.")
    if wish.resume is not None and not isinstance(wish.resume, str | os.PathLike):
        raise ConfigError(f"resume must be the name of a file, such as 'eval.jsonl', got {wish.resume!r}.")
    max_steps = None if wish.max_steps is None else whole_number("max_steps", wish.max_steps, least=1)
    episodes, digests = read_episodes(wish.episodes, wish.seed, wish.options)
    num_envs = min(_count_envs(wish.num_envs, scene.num_envs), len(episodes))
    _show(policy, scene)
    spec = WeightsSpec.of(policy.weights())
    weights = spec.encode(policy.weights()).tobytes()
    given = {**wish.values, **({"deterministic": True} if wish.deterministic else {})}
    plan = EvaluationPlan(
        factory=scene.factory,
        policy=policy,
        weights_spec=spec,
        weights=weights,
        values=pickle_arguments(given),
        max_steps=max_steps or _ENDLESS_STEPS,
        seed=episodes[0].seed,
    )
    settings = {
        "env": scene.env_name,
        "made_by": scene.made_by,
        "factory": digest_of_code(scene.factory, has_state=True),
        "policy": identify(policy, agent),
        "max_steps": max_steps,
        "deterministic": wish.deterministic,
        "values": digest_of(dict(wish.values), "values") if wish.values else "",
    }
    with contextlib.ExitStack() as stack:
        journal = None
        if wish.resume is not None:
            journal = stack.enter_context(Journal(Path(wish.resume), settings, episodes, digests))
        finished = {} if journal is None else dict(journal.finished)
        num_found = len(finished)
        playing = _play(backend, plan, episodes, finished, num_envs, scene.num_workers)
        for each in stack.enter_context(contextlib.closing(playing)):
            if each.was_cut and max_steps is None:
                raise _endless(episodes[each.index])
            if journal is not None:
                journal.append(each)
            finished[each.index] = each
    manifest = {
        **describe_here(),
        **settings,
        "values": {name: repr(value) for name, value in wish.values.items()},
        "agent": type(agent).__name__,
        "launcher": scene.launcher,
        "num_workers": scene.num_workers,
        "num_envs": num_envs,
        "started_at": started_at.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 3),
        "resumed_episodes": num_found,
    }
    table = [finished[episode.index] for episode in episodes]
    if any(each.was_mixed for each in table):
        log.warning(
            "the agent drew random numbers that episodes share, though not in their first steps: another evaluation "
            "may give another table. Let it draw in every step, or from the rng that a policy function is given."
        )
    return _tabulate(table, episodes, manifest)


def _play(
    backend: PlayingBackend,
    plan: EvaluationPlan,
    episodes: Sequence[Episode],
    finished: Mapping[int, Finished],
    num_envs: int,
    num_workers: int,
) -> Generator[Finished, None, None]:
    """Play the episodes that are not finished, showing progress; yield each one when it is over."""
    left = [episode.index for episode in episodes if episode.index not in finished]
    if not left:
        return
    num_envs = min(num_envs, len(left))
    dealer = Dealer(left, max(1, min(num_envs, num_workers)), plan.max_steps)
    playing = backend.play(plan, episodes, dealer, num_envs)
    total = sum(each.total for each in finished.values())
    with contextlib.closing(playing), Progress(len(episodes)) as progress:
        for group in playing:
            for each in group:
                total += each.total
                yield each
            if finished:
                progress.show(len(finished), total / len(finished))


def read_episodes(episodes: int | None, seed: Any, options: Any) -> tuple[list[Episode], list[str]]:
    """Read which episodes are requested; return them, and a digest of each one's options.

    Raises:
        ConfigError: The arguments are invalid, do not match in number, or name an episode twice.
    """
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        count = whole_number("episodes", _DEFAULT_EPISODES if episodes is None else episodes, least=1)
        seeds = [int(seed) + index for index in range(count)]
    elif isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str):
        seeds = [whole_number("A seed of evaluate()", item, least=0) for item in seed]
        if not seeds:
            raise ConfigError("seed is an empty list: give one seed per episode.")
        if episodes not in (None, len(seeds)):
            raise ConfigError(f"episodes={episodes}, but there are {len(seeds)} seeds: leave episodes out.")
    else:
        raise ConfigError(f"seed must be an int, or a list with one per episode, got {seed!r}.")
    if not 0 <= min(seeds) <= max(seeds) < _SEED_LIMIT:
        raise ConfigError(f"Seeds must be from 0 to 2**63 - 1, got {min(seeds)} to {max(seeds)}.")
    if options is None or isinstance(options, dict):
        each: Sequence[Any] = [options] * len(seeds)
        twice, count = Counter(seeds).most_common(1)[0]
        if count > 1:
            raise ConfigError(
                f"Seed {twice} is given more than once: that episode would count twice. Leave it out, or give "
                "options= as a list if the episodes differ in these."
            )
    elif isinstance(options, Sequence) and not isinstance(options, str):
        each = options
        odd = [item for item in each if item is not None and not isinstance(item, dict)]
        if odd or len(each) != len(seeds):
            got = f"one with {odd[0]!r} in it" if odd else f"{len(each)}"
            raise ConfigError(
                f"options must be a dict, or a list of {len(seeds)} dicts, one per episode, got a list: {got}."
            )
    else:
        raise ConfigError(f"options must be a dict, or a list with one per episode, got {options!r}.")
    pickled: dict[int, bytes] = {id(item): cloudpickle.dumps(item) for item in each if item is not None}
    digests = {id(item): digest_of(item, "options") for item in each if item is not None}
    return (
        [Episode(index, seeds[index], pickled.get(id(item))) for index, item in enumerate(each)],
        [digests.get(id(item), "") for item in each],
    )


def identify(policy: Policy, agent: object) -> str:
    """Return a digest that identifies an agent: of its weights, its class, and the code of its functions."""
    arrays = {name: array for name, array in policy.weights().items() if name != VALUES}
    contents: Contents | None = getattr(policy, "contents", None)
    # Not as they are sent: a set is pickled differently in each process.
    plain = [] if contents is None else contents.read_plain()
    code = digest_of_code(agent if contents is None else contents.payload, has_state=False)
    return digest_of_code([type(agent), arrays, plain, code], has_state=True)


def _count_envs(num_envs: int | None, usual: int) -> int:
    return usual if num_envs is None else whole_number("num_envs", num_envs, least=1)


def _show(policy: Policy, scene: Scene) -> None:
    """Show some observations to a policy that wants to see some: the same ones, whatever was seen in training."""
    policy.stamp()  # First, because it finds what has changed.
    if (look_at := getattr(policy, "look_at", None)) is not None:
        layout = Layout(scene.observation_space)
        made_up = copy.deepcopy(scene.observation_space)  # The user's own must not be seeded.
        made_up.seed(0)
        samples = [layout.flatten(made_up.sample()) for _ in range(_SHOWN_ROWS)]
        look_at(
            layout.nest(
                [
                    np.stack([np.asarray(part, leaf.dtype) for part in column])
                    for leaf, column in zip(layout.leaves, zip(*samples, strict=True), strict=True)
                ]
            ),
            scene.action_space,
        )


def _endless(episode: Episode) -> ConfigError:
    return ConfigError(
        f"Episode {episode.index} (seed {episode.seed}) has not ended within {_ENDLESS_STEPS:,} steps: with this agent "
        "it may never end. Say how long one may be: evaluate(..., max_steps=1_000) truncates it there."
    )


def _tabulate(table: Sequence[Finished], episodes: Sequence[Episode], manifest: Mapping[str, Any]) -> Evaluation:
    return Evaluation(
        returns=np.array([each.total for each in table], np.float64),
        lengths=np.array([each.length for each in table], np.int64),
        seeds=np.array([episode.seed for episode in episodes], np.int64),
        terminated=np.array([each.terminated for each in table], np.bool_),
        truncated=np.array([each.truncated for each in table], np.bool_),
        final_infos=[each.info for each in table],
        is_repeatable=not any(each.was_mixed for each in table),
        manifest=manifest,
    )
