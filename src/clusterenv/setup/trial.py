"""Trial: makes one environment in a short-lived process beside the head, to check that it works and describe it.

With workers, the head itself never makes an environment: a constructor that crashes, hangs or opens a window would do
so in the learner's process. `run` is the main function of the short-lived process: it reads an assignment from its
standard input, and writes the outcome to the descriptor it is given. Both ends are this library's own code, on this
machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from clusterenv.errors import ConfigError
from clusterenv.setup.factories import pickle_code
from clusterenv.setup.sample import Description
from clusterenv.wire.assignment import Assignment

log = logging.getLogger(__name__)

_TAIL_BYTES = 4096
# What may exist on the workers' machines only.
_DEVICES = re.compile(r"cuda|gpu|device|display|opengl|\begl\b|\bgl\b|vulkan", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an environment could not be made.

    Attributes:
        text: The explanation for the user.
        may_be_here_only: Whether it may work elsewhere: a module or device is missing here, or time was too short.
    """

    text: str
    may_be_here_only: bool


def describe_here(assignment: Assignment, timeout_s: float) -> Description:
    """Describe an environment whose spaces cannot be sent by a worker.

    Args:
        assignment: An assignment of one environment.
        timeout_s: How long making it may take.

    Raises:
        ConfigError: The environment cannot be made here.
    """
    found = _try(assignment, timeout_s)
    if isinstance(found, Failure):
        raise ConfigError(
            "The environments have a space that is not one of Gymnasium's own types, so a worker cannot send it, and "
            f"no environment can be made on this machine to inspect: {found.text} Use Gymnasium's spaces, or pass "
            "observation_mode=(batched, single)."
        )
    return found


def check_factory(assignment: Assignment, timeout_s: float) -> None:
    """Check that an environment can be made, before workers are queued that would find out much later.

    Raises:
        ConfigError: It cannot be made, and not because a module, a device or time is lacking on this machine.
    """
    found = _try(assignment, timeout_s)
    if not isinstance(found, Failure):
        return
    if found.may_be_here_only:
        log.warning("an environment could not be tried here before workers are queued: %s", found.text.splitlines()[0])
        return
    raise ConfigError(
        f"{found.text}\nNothing was queued. If it can be made on the workers' machines only, Timeouts(trial_s=0) skips "
        "this trial."
    )


def _try(assignment: Assignment, timeout_s: float) -> Description | Failure:
    if not hasattr(os, "killpg"):
        return Failure(text="Windows has no way to end a process with all that it has started.", may_be_here_only=True)
    code = pickle_code(assignment, "The factory of environment 0")
    # A file rather than a pipe: the description of a pixel space would fill a pipe, which nobody reads meanwhile.
    with tempfile.TemporaryFile() as log_file, tempfile.TemporaryFile() as results:
        process = subprocess.Popen(
            [sys.executable, "-c", "from clusterenv.setup.trial import run; run()", str(results.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            pass_fds=[results.fileno()],
            start_new_session=True,
        )
        try:
            process.communicate(code, timeout_s)
        except subprocess.TimeoutExpired:
            return Failure(text=f"Environment 0 was not made within {timeout_s:g} s.", may_be_here_only=True)
        finally:
            _end(process)
        results.seek(0)
        data = results.read()
        if data:
            outcome: Description | Failure = cloudpickle.loads(data)
            return outcome
        log_file.seek(max(0, log_file.tell() - _TAIL_BYTES))
        tail = log_file.read().decode(errors="replace").strip()
        return Failure(
            text=f"The process that made environment 0 ended with status {process.returncode}, and printed:\n{tail}",
            may_be_here_only=False,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all processes it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def run() -> None:
    """Make and describe an environment; the main function of the short-lived process."""
    from clusterenv.worker.making import describe_envs
    from clusterenv.worker.shard import Shard, unpickle

    descriptor = int(sys.argv[1])
    outcome: Any
    try:
        shard = Shard(unpickle(sys.stdin.buffer.read()))
        outcome = describe_envs(shard.make())
        data = cloudpickle.dumps(outcome)
        shard.close()
    except Exception as error:  # noqa: BLE001 - a user's constructor may raise anything; it is reported
        is_missing = isinstance(error, ImportError | OSError) or _DEVICES.search(str(error)) is not None
        text = f"Environment 0 cannot be made: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        data = cloudpickle.dumps(Failure(text=text, may_be_here_only=is_missing))
    with open(descriptor, "wb") as results:
        results.write(data)
