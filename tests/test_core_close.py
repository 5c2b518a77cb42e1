"""A close() that was interrupted is finished by the next, in a process that lives on; a pending call is warned of."""

from __future__ import annotations

import numpy as np
import pytest

from clusterenv import ClusterEnv, Timeouts
from tests.conftest import Backend
from tests.counted import Counted
from tests.script import run_script

CLOSING = """
import faulthandler, gc, json, os, sys
from pathlib import Path
import numpy as np
from clusterenv import ClusterEnv, Network, Timeouts
from tests.interruption import count_lines, is_interrupted, spread_lines
from tests.counted import Counted, choose

transport, during, most = sys.argv[1:]

def start():
    network, timeouts = Network(transport=transport), Timeouts(close_s=2)
    envs = ClusterEnv([Counted] * 3, num_workers=2, network=network, timeouts=timeouts)
    envs.reset(seed=1)
    if during == "a stream":
        next(envs.stream(choose, 4))
    elif during == "a step":
        envs.step_async(np.zeros(3, np.int64))
    return envs

def belongings():
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # The listing's own.
            pass
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    return {"children": children, "descriptors": sorted(descriptors), "maps": maps}

start().close()  # Libraries make once what they keep.
gc.collect()
before = belongings()
num_lines = count_lines(start().close)
num_interrupted = 0
for line in spread_lines(num_lines, int(most)):
    faulthandler.dump_traceback_later(20, exit=True)
    envs = start()
    was_interrupted = is_interrupted(envs.close, line)
    num_interrupted += was_interrupted
    envs.close()
    envs.close()
    assert envs.closed
    del envs
    gc.collect()
    if (after := belongings()) != before:
        print(json.dumps([line, after]))
        break
faulthandler.cancel_dump_traceback_later()
assert num_interrupted
"""


# Each starts workers two dozen times.
@pytest.mark.parametrize(
    "during", ["a stream", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nothing", "a step"))]
)
@pytest.mark.filterwarnings("ignore:Calling `close`")
def test_a_close_that_was_interrupted_is_finished_by_the_next(remote: Backend, during: str) -> None:
    left = run_script(CLOSING, remote["network"].transport, during, "10", deadline_s=100)
    assert left == [], "interrupted before this line, the second close() left this behind"


@pytest.mark.parametrize("name", ["reset", "step", "call"])
def test_a_pending_call_is_warned_of_at_close_as_gymnasium_does(remote: Backend, name: str) -> None:
    envs = ClusterEnv([Counted] * 2, **remote)
    envs.reset(seed=1)
    match name:
        case "reset":
            envs.reset_async(seed=2)
        case "step":
            envs.step_async(np.zeros(2, np.int64))
        case "call":
            envs.call_async("index")
    with pytest.warns(UserWarning, match=f"Calling `close` while waiting for a pending call to `{name}` to complete"):
        envs.close()


def test_closed_environments_have_no_workers_that_are_ready() -> None:
    envs = ClusterEnv("CartPole-v1", 2, num_workers=1, timeouts=Timeouts())
    assert [worker.state for worker in envs.workers] == ["ready"]
    envs.close()
    assert [worker.state for worker in envs.workers] == ["closed"]
