"""The kit: lawful vector environments keep every law, and each law can be broken and is then named."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from clusterenv import ClusterEnv, Network
from clusterenv.errors import ConfigError
from clusterenv.testing import LAWS, LawsBroken, check_vector_env
from tests.conftest import Backend
from tests.lawless import LAWLESS, NUM_ENVS, LeavesFiles, LeavesProcess
from tests.test_import import run
from tests.worlds import make_factories

PAGE = Path(__file__).parent.parent / "docs" / "testing.md"
FAULTS = {"one-killed", "all-killed", "close-after-kill"}
ENDS = {"close-pending", "close-twice", "use-after-close", "processes", "descriptors"}
HALVES = {"async-halves", "async-order", "close-pending"}
OF_MODES = {
    "next-step": AutoresetMode.NEXT_STEP,
    "same-step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


@pytest.fixture(scope="module", autouse=True)
def _multiprocessing_has_its_heap() -> None:
    """Let multiprocessing make the memory that it keeps for the life of the process: AsyncVectorEnv's is in it."""
    multiprocessing.RawArray("b", 1)


def others(mode: AutoresetMode) -> set[str]:
    """The laws of other modes than this."""
    return {law for law, its_mode in OF_MODES.items() if its_mode != mode}


def only(*laws: str) -> set[str]:
    """What to skip so that these laws are left."""
    return set(LAWS) - {"run", *laws}


def pids_of(envs: ClusterEnv) -> tuple[int, ...]:
    return envs.worker_pids


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, *(pytest.param(mode, marks=pytest.mark.slow) for mode in list(AutoresetMode)[1:])]
)
def test_clusterenv_keeps_every_law(mode: AutoresetMode, backend: Backend) -> None:
    factories = make_factories(NUM_ENVS)
    # How it ends is the same in all modes, and to start workers for it takes its time.
    is_brief = backend["num_workers"] > 0 and mode != AutoresetMode.NEXT_STEP
    report = check_vector_env(
        lambda: ClusterEnv(factories, autoreset_mode=mode, **backend),
        factories=factories,
        skip=ENDS if is_brief else (),
        num_steps=60,
    )
    assert report.broken == ()
    assert set(report.not_applicable) == others(mode) | FAULTS


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("mode", "transport", "laws"),
    [
        (AutoresetMode.NEXT_STEP, "zmq", FAULTS),
        (AutoresetMode.SAME_STEP, "shm", {"one-killed"}),
        pytest.param(AutoresetMode.SAME_STEP, "shm", {"all-killed"}, marks=pytest.mark.slow),
        pytest.param(AutoresetMode.DISABLED, "shm", {"one-killed"}, marks=pytest.mark.slow),
    ],
)
def test_clusterenv_survives_what_it_says(mode: AutoresetMode, transport: str, laws: set[str]) -> None:
    backend: Backend = {"num_workers": 2, "network": Network(transport=transport)}
    report = check_vector_env(
        lambda: ClusterEnv(make_factories(NUM_ENVS), autoreset_mode=mode, **backend),
        worker_pids=pids_of,
        skip=only(*laws),
        num_steps=20,
    )
    assert set(report.kept) == {"run", *laws}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_gymnasiums_sync_breaks_what_the_page_says(mode: AutoresetMode) -> None:
    factories = make_factories(NUM_ENVS, infos="sparse")
    report = check_vector_env(
        lambda: SyncVectorEnv(factories, autoreset_mode=mode), factories=factories, num_steps=60, raises=False
    )
    assert set(report.broken) == broken_on_the_page("`SyncVectorEnv`")
    assert set(report.not_applicable) == others(mode) | FAULTS | HALVES


@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, *(pytest.param(mode, marks=pytest.mark.slow) for mode in list(AutoresetMode)[1:])]
)
def test_gymnasiums_async_breaks_what_the_page_says(mode: AutoresetMode) -> None:
    factories = make_factories(NUM_ENVS, infos="sparse")
    report = check_vector_env(
        lambda: AsyncVectorEnv(factories, autoreset_mode=mode), factories=factories, num_steps=60, raises=False
    )
    assert set(report.broken) == broken_on_the_page("`AsyncVectorEnv`")
    assert set(report.not_applicable) == others(mode) | FAULTS


def broken_on_the_page(name: str) -> set[str]:
    """The laws that docs/testing.md says this breaks."""
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} "))
    return {law for law in LAWS if f"`{law}`" in row.split("|")[2]}


def test_nested_spaces_are_looked_into() -> None:
    inner = spaces.Dict({"a": spaces.Box(0, 9, (2,)), "b": spaces.Tuple((spaces.Discrete(3), spaces.Text(4)))})
    factories = make_factories(2, observation_space=inner, action_space=inner)
    report = check_vector_env(lambda: ClusterEnv(factories, num_workers=0), factories=factories, num_steps=30)
    assert set(report.not_applicable) == others(AutoresetMode.NEXT_STEP) | FAULTS


def test_one_environment_is_enough() -> None:
    factories = make_factories(1)
    report = check_vector_env(lambda: ClusterEnv(factories, num_workers=0), factories=factories, num_steps=30)
    assert set(report.not_applicable) == others(AutoresetMode.NEXT_STEP) | FAULTS | {"reset-mask"}


def test_without_copies_the_laws_of_observations_that_are_kept_do_not_apply() -> None:
    check_vector_env(lambda: ClusterEnv(make_factories(NUM_ENVS), copy=False, num_workers=0), num_steps=30)


@pytest.fixture
def _nothing_of_theirs_is_left() -> Iterator[None]:
    """Take away what those leave behind that are caught leaving something."""
    yield
    for process in LeavesProcess.left:
        process.kill()
        process.wait()
    for descriptor in LeavesFiles.left:
        os.close(descriptor)
    LeavesProcess.left.clear()
    LeavesFiles.left.clear()


@pytest.mark.usefixtures("_nothing_of_theirs_is_left")
@pytest.mark.parametrize(("law", "make"), LAWLESS, ids=[f"{law}-{number}" for number, (law, _) in enumerate(LAWLESS)])
def test_who_breaks_a_law_is_caught(law: str, make: Callable[[], Any]) -> None:
    report = check_vector_env(
        make,
        factories=make_factories(NUM_ENVS),
        worker_pids=pids_of if law in FAULTS else None,
        num_steps=60,
        skip=only(law),
        raises=False,
    )
    assert report.broken == (law,), str(report)
    message = report[law].message
    assert "\nTo see it again:\n    envs = make()\n" in message


def test_an_environment_that_does_not_survive_faults_is_caught() -> None:
    report = check_vector_env(
        lambda: AsyncVectorEnv(make_factories(2)),
        worker_pids=lambda envs: [process.pid for process in envs.processes],
        skip=only(*FAULTS),
        num_steps=20,
        raises=False,
    )
    assert set(report.broken) == FAULTS
    for process in multiprocessing.active_children():  # It is not able to close any more.
        process.kill()
        process.join()


def test_there_is_a_culprit_for_every_law() -> None:
    assert {law for law, _ in LAWLESS} | FAULTS == set(LAWS)


def test_only_own_descendants_are_killed() -> None:
    report = check_vector_env(
        lambda: ClusterEnv(make_factories(2), num_workers=0),
        worker_pids=lambda envs: [os.getpid()],
        skip=only("one-killed"),
        num_steps=20,
        raises=False,
    )
    assert f"names {os.getpid()}, which was not started by this process" in report["one-killed"].message


class Hanging(SyncVectorEnv):
    def step(self, actions: Any) -> Any:
        threading.Event().wait()


def test_what_hangs_is_broken_and_timers_of_others_stay() -> None:
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    report = check_vector_env(lambda: Hanging(make_factories(2)), deadline_s=0.2, raises=False)
    assert report["run"].message.startswith("It hangs: what was expected at once had not come after 0.2 s.")
    assert report.kept == ("vector-env", "autoreset-mode", "batched-spaces")
    after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert (before == 0) is (after == 0)
    assert after <= before


class Leaving(SyncVectorEnv):
    def step(self, actions: Any) -> Any:
        raise SystemExit(3)


def test_one_that_ends_the_process_is_broken_and_the_process_goes_on() -> None:
    report = check_vector_env(lambda: Leaving(make_factories(2)), raises=False)
    assert report["run"].message.startswith("It raised SystemExit: 3")


def test_broken_laws_raise_with_all_of_them_and_how_to_see_them_again() -> None:
    with pytest.raises(LawsBroken) as caught:
        check_vector_env(lambda: SyncVectorEnv(make_factories(2, infos="none")), num_steps=30)
    assert isinstance(caught.value, AssertionError)
    text = str(caught.value)
    assert text.startswith("SyncVectorEnv(num_envs=2), NEXT_STEP: ")
    assert "laws kept, 3 broken, " in text
    assert "\nbroken          options-untouched " in text
    assert "envs.reset(options={'reset_mask': array([ True, False])})" in text
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.report == caught.value.report


def test_what_is_skipped_need_not_be_kept() -> None:
    skip = ["options-untouched", "refusals", "use-after-close"]
    report = check_vector_env(lambda: SyncVectorEnv(make_factories(2, infos="none")), num_steps=30, skip=skip)
    assert [verdict.law for verdict in report.verdicts if verdict.outcome == "skipped"] == skip


def test_episodes_that_never_end_leave_the_laws_of_their_end_open() -> None:
    factories = make_factories(2, longest_episode=10**6)
    report = check_vector_env(lambda: ClusterEnv(factories, num_workers=0), num_steps=20)
    assert report["next-step"].message == "No episode ended within 20 steps; give num_steps=."


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (None, {}, "make must be a function that returns a new vector environment"),
        (dict, {"skip": ["same-sede"]}, "there is no law 'same-sede'. Did you mean 'same-seed'?"),
        (dict, {"skip": "same-seed"}, r"such as \['same-seed'\]"),
        (dict, {"skip": ["run"]}, "the law 'run' is what all others look at"),
        (dict, {"num_steps": 1}, "num_steps must be at least 10, got 1"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_vector_env(make, **options)


def test_factories_of_another_number_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 factories for 3 environments"):
        check_vector_env(lambda: ClusterEnv(make_factories(3), num_workers=0), factories=make_factories(2))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_real_environment_keeps_the_laws_however_long_its_episodes_took(mode: AutoresetMode) -> None:
    def make() -> gym.Env[Any, Any]:
        return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))

    factories = [make] * 3
    check_vector_env(lambda: ClusterEnv(factories, num_workers=0, autoreset_mode=mode), factories=factories)


def test_the_kit_needs_no_test_framework() -> None:
    assert run("import clusterenv.testing, sys; print({'pytest', 'torch'} & set(sys.modules))").strip() == "set()"


def test_the_page_lists_every_law_in_its_words() -> None:
    page = PAGE.read_text()
    for law, text in LAWS.items():
        assert f"| `{law}` | {text} |" in page
