"""What the learner is told: a record of each worker, and errors that are also of their own type."""

from __future__ import annotations

import os
import resource
import signal
import socket
from typing import Any

import numpy as np
import pytest

from clusterenv import ClusterEnv, Network
from clusterenv.errors import WorkerFailed
from tests.conftest import Backend
from tests.counted import Counted
from tests.policies import Linear


def test_workers_are_told_of_in_records_that_cannot_be_written(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 5, **remote) as envs:
        envs.reset(seed=1)
        workers = envs.workers
        assert isinstance(workers, tuple)
        assert [worker.index for worker in workers] == [0, 1]
        assert [tuple(worker.environments) for worker in workers] == [(0, 1, 2), (3, 4)]
        pids = envs.apply(lambda _: os.getpid(), [0, 3])
        assert tuple(worker.pid for worker in workers) == pids
        assert {worker.host for worker in workers} == {socket.gethostname()}
        assert [worker.state for worker in workers] == ["ready", "ready"]
        assert [worker.version for worker in workers] == [0, 0]
        assert [len(worker.losses) for worker in workers] == [0, 0]
        for name in ("index", "pid", "host", "state", "environments", "version", "losses"):
            with pytest.raises(AttributeError):
                setattr(workers[0], name, None)
        rollout = envs.rollout(agent, 4)
        assert [worker.version for worker in envs.workers] == rollout.versions[[0, 3]].tolist() == [1, 1]
        os.kill(pids[1], signal.SIGKILL)
        envs.rollout(agent, 4)
        assert [list(worker.losses) for worker in envs.workers] == [[], list(envs.losses)]
        assert len(envs.losses) == 1
        assert envs.workers[1].pid != pids[1]
        assert workers[1].pid == pids[1], "a record is of its moment"


def test_an_exception_of_a_built_in_type_is_caught_by_that_type(remote: Backend) -> None:
    class Fussy(Counted):
        def step(self, action: Any) -> Any:
            raise {0: ValueError, 1: KeyError, 2: FileNotFoundError}[int(action)]("not this one")

    with ClusterEnv([Fussy] * 2, **remote) as envs:
        for action, kind in enumerate((ValueError, KeyError, OSError)):
            envs.reset(seed=1)
            with pytest.raises(kind, match="not this one") as caught:
                envs.step(np.full(2, action))
            assert isinstance(caught.value, WorkerFailed)
            assert caught.value.env_indices == (0,)


def test_a_worker_without_free_descriptors_says_so_and_goes_on_when_it_has_some() -> None:
    agent = Linear()

    def limit(soft: int | None) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] if soft is None else soft, limits[1]))

    with ClusterEnv("CartPole-v1", 2, num_workers=1, network=Network(transport="shm")) as envs:
        envs.rollout(agent, 2)
        envs.apply(lambda _: limit(1), [0])
        with pytest.raises(WorkerFailed, match="Too many open files"):
            envs.rollout(agent, 3)
        envs.apply(lambda _: limit(None), [0])
        assert envs.rollout(agent, 3).num_steps == 3
