"""The supervisor decides from events and the time alone what is done for every worker."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from clusterenv import Faults, Timeouts
from clusterenv.errors import LaunchError, WorkerLost
from clusterenv.head.supervisor import GiveUp, Prepare, Restart, Supervisor
from clusterenv.head.worker import Stage, Worker, WorkerState

pytestmark = pytest.mark.quick

STAGES = list(Stage)
TIMEOUTS = Timeouts(join_s=100.0, call_s=10.0)


def supervise(num_workers: int = 1, faults: Faults | None = None) -> tuple[Supervisor, list[Worker]]:
    workers = [Worker(index, 2 * index, 2 * index + 2) for index in range(num_workers)]
    return Supervisor(workers, faults or Faults(), TIMEOUTS), workers


def bring_up(supervisor: Supervisor, workers: Sequence[Worker], now: float = 0.0) -> None:
    """Let workers join and be given everything."""
    supervisor.is_open = True
    for worker in workers:
        supervisor.joined(worker, now)
    for stage in STAGES:
        assert supervisor.advance(now) == [Prepare(worker, stage) for worker in workers]
        for worker in workers:
            supervisor.prepared(worker, now)
    assert all(worker.is_ready for worker in workers)


def test_a_worker_that_joins_is_given_everything_in_order_and_asked_once() -> None:
    supervisor, workers = supervise(2)
    bring_up(supervisor, workers)
    assert supervisor.advance(1.0) == []
    assert supervisor.losses == []


def test_nobody_is_served_before_the_spaces_are_known() -> None:
    supervisor, (worker,) = supervise()
    supervisor.joined(worker, 0.0)
    assert supervisor.advance(0.0) == [Prepare(worker, Stage.ASSIGN)]
    supervisor.prepared(worker, 1.0)
    assert supervisor.advance(1.0) == []
    supervisor.is_open = True
    assert supervisor.advance(1.0) == [Prepare(worker, Stage.SERVE)]


def test_a_lost_worker_is_started_again_and_the_loss_is_written_down_when_another_has_taken_over() -> None:
    supervisor, (worker,) = supervise()
    bring_up(supervisor, [worker])
    supervisor.seed(7)
    worker.num_answers = 100
    supervisor.lost(worker, "it ended", 5.0)
    assert worker.state is WorkerState.LOST
    assert supervisor.advance(5.0) == [Restart(worker)]
    assert supervisor.advance(5.1) == []
    bring_up(supervisor, [worker], 7.0)
    (loss,) = supervisor.losses
    assert (loss.worker_index, loss.env_indices, loss.reason, loss.recovery_s) == (0, (0, 1), "it ended", 2.0)
    assert loss.seeds == tuple(worker.seeds)


def test_one_that_comes_back_uncalled_is_taken_in_and_nobody_else_is_started() -> None:
    supervisor, (worker,) = supervise()
    bring_up(supervisor, [worker])
    supervisor.lost(worker, "its connection was lost", 5.0)
    supervisor.joined(worker, 5.0)
    assert supervisor.advance(5.0) == [Prepare(worker, Stage.ASSIGN)]


def test_replacements_that_are_of_no_use_wait_longer_and_longer_and_then_there_are_no_more() -> None:
    supervisor, (worker,) = supervise()
    bring_up(supervisor, [worker])
    now = 0.0
    for attempt in range(3):
        supervisor.lost(worker, "it crashed", now)
        assert worker.fatal is None
        if attempt:
            assert supervisor.advance(now + 0.5) == []
        now += attempt
        assert supervisor.advance(now) == [Restart(worker)]
        bring_up(supervisor, [worker], now)
    supervisor.lost(worker, "it crashed", now)
    assert isinstance(worker.fatal, WorkerLost)
    assert "3 replacements in a row" in str(worker.fatal)
    assert supervisor.advance(now + 1000) == []


def test_one_that_has_been_of_use_begins_with_a_clean_sheet() -> None:
    supervisor, (worker,) = supervise()
    bring_up(supervisor, [worker])
    for number in range(10):
        worker.num_answers = 100
        supervisor.lost(worker, "preempted", float(number))
        assert supervisor.advance(float(number)) == [Restart(worker)]
        bring_up(supervisor, [worker], float(number))
    assert len(supervisor.losses) == 10


def test_max_restarts_counts_over_the_whole_run() -> None:
    supervisor, workers = supervise(2, Faults(max_restarts=2))
    bring_up(supervisor, workers)
    for number, worker in enumerate((workers[0], workers[1])):
        worker.num_answers = 100
        supervisor.lost(worker, "gone", float(number))
        assert supervisor.advance(float(number)) == [Restart(worker)]
        bring_up(supervisor, [worker], float(number))
    workers[0].num_answers = 100
    supervisor.lost(workers[0], "gone", 5.0)
    assert "max_restarts=2" in str(workers[0].fatal)


def test_max_restarts_counts_workers_that_are_lost_at_once() -> None:
    supervisor, workers = supervise(3, Faults(max_restarts=2))
    bring_up(supervisor, workers)
    for worker in workers:
        supervisor.lost(worker, "gone", 1.0)
    assert supervisor.advance(1.0) == [Restart(worker) for worker in workers[:2]]
    assert "max_restarts=2" in str(workers[2].fatal)


def test_with_on_loss_raise_the_first_loss_is_final() -> None:
    supervisor, (worker,) = supervise(faults=Faults(on_loss="raise"))
    bring_up(supervisor, [worker])
    supervisor.lost(worker, "it ended (killed by SIGKILL)", 1.0)
    assert isinstance(worker.fatal, WorkerLost)
    assert worker.fatal.env_indices == (0, 1)
    assert supervisor.advance(100.0) == []


def test_one_that_does_not_join_in_time_is_given_up_and_started_again() -> None:
    supervisor, (worker,) = supervise()
    bring_up(supervisor, [worker])
    supervisor.lost(worker, "gone", 0.0)
    supervisor.advance(0.0)
    assert supervisor.advance(100.0) == []
    (decision,) = supervisor.advance(100.1)
    assert isinstance(decision, GiveUp)
    assert "100 s" in decision.reason
    supervisor.lost(worker, decision.reason, 100.1)
    assert supervisor.advance(200.0) == [Restart(worker)]


@pytest.mark.parametrize(("stage", "limit_s"), [(Stage.ASSIGN, 100.0), (Stage.SERVE, 10.0), (Stage.ADOPT, 10.0)])
def test_a_stage_that_takes_too_long_is_a_loss(stage: Stage, limit_s: float) -> None:
    supervisor, (worker,) = supervise()
    supervisor.is_open = True
    supervisor.joined(worker, 0.0)
    for _ in range(stage):
        supervisor.advance(0.0)
        supervisor.prepared(worker, 0.0)
    supervisor.advance(0.0)
    assert supervisor.advance(limit_s) == []
    (decision,) = supervisor.advance(limit_s + 0.1)
    assert isinstance(decision, GiveUp)


def test_a_worker_that_ends_before_the_run_has_begun_is_an_error_of_the_launch() -> None:
    supervisor, (worker,) = supervise()
    supervisor.lost(worker, "it ended (exit status 3) before it joined", 1.0)
    assert isinstance(worker.fatal, LaunchError)


def test_a_late_worker_is_waited_for_without_end_and_is_no_loss_when_it_comes() -> None:
    supervisor, workers = supervise(2)
    bring_up(supervisor, workers[:1])
    supervisor.begin_without(workers[1])
    assert supervisor.advance(10_000.0) == []
    bring_up(supervisor, workers[1:], 10_000.0)
    assert supervisor.losses == []


def test_seeds_of_replacements_follow_from_the_runs_and_an_unseeded_reset_does_not_erase_that() -> None:
    seeds = []
    for unseeded in (False, True):
        supervisor, workers = supervise(2)
        bring_up(supervisor, workers)
        supervisor.seed(3)
        if unseeded:
            supervisor.seed(None)
        supervisor.lost(workers[1], "gone", 1.0)
        seeds.append(workers[1].seeds)
    assert seeds[0] == seeds[1]
    assert seeds[0][1] == seeds[0][0] + 1


def test_one_that_is_lost_before_the_run_begins_without_it_is_started_again() -> None:
    supervisor, workers = supervise(2, Faults(min_workers=1))
    bring_up(supervisor, workers)
    supervisor.lost(workers[1], "it ended", 1.0)
    supervisor.begin_without(workers[1])
    assert Restart(workers[1]) in supervisor.advance(10.0)


def test_the_name_of_a_lost_workers_host_is_as_it_is_written() -> None:
    supervisor, (worker,) = supervise(1, Faults(on_loss="raise"))
    bring_up(supervisor, [worker])
    worker.pid, worker.hostname = 7, "GPU-Node7"
    supervisor.lost(worker, "it ended", 1.0)
    assert str(worker.fatal).startswith("Worker 0 (pid 7 on GPU-Node7)")
