"""Step: one `srun` inside a job that runs, held as a child process of the head."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from clusterenv.errors import LaunchError
from clusterenv.launchers.slurm_log import Place, StepLog

_TERM_S = 2.0  # srun ends the step's processes when it is terminated; then it is killed itself.


class Step:
    """A step of a job, as its `srun` reports it: what its workers print comes to the head, whatever files they see.

    Attributes:
        id: The job's number.
        log: What its workers have written.
        is_requeued: Never: a step ends with its job.
    """

    is_requeued = False

    def __init__(self, command: Sequence[str], environment: dict[str, str], log_dir: Path | None, job_id: str) -> None:
        """Start it.

        Args:
            command: An `srun`.
            environment: The ticket is in it.
            log_dir: Where to keep what its workers print, in a new file; None: only for error messages.
            job_id: Of the job it is to be part of.

        Raises:
            LaunchError: There is no srun.
        """
        self.id = job_id
        self.log = StepLog(self._read_log)
        self._file = _open(log_dir, f"job-{job_id}-step")
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=self._file,
                process_group=0,  # Ctrl-C is for the head.
            )
        except OSError as error:
            self._file.close()
            raise LaunchError(f"Could not run srun: {error}.") from error

    def __str__(self) -> str:
        """Say where it runs."""
        return f"they are starting in job {self.id}"

    @property
    def ended(self) -> str:
        """How srun, and with it all its workers, ended; empty if it has not."""
        status = self._process.poll()
        return "" if status is None else f"srun ended in job {self.id}, {describe_status(status)}"

    @property
    def places(self) -> dict[int, Place]:
        """Where its workers are."""
        return self.log.places

    @property
    def ends(self) -> dict[int, int]:
        """The exit status of each worker that has ended."""
        return self.log.ends

    def has_node(self, name: str) -> bool:
        """Whether a node is still part of it: srun itself notices."""
        return True

    def look(self) -> None:
        """Note what has been written by now."""
        self.log.follow()

    def stop(self, timeout_s: float) -> None:
        """Wait this long for it to end by itself, then end it."""
        if not self._has_ended(timeout_s):
            self._process.terminate()
        if not self._has_ended(_TERM_S):
            self._process.kill()
            self._process.wait()
        self.log.follow()
        self._file.close()

    def _has_ended(self, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_log(self, position: int) -> bytes:
        if self._file.closed:
            return b""
        # The position of the file itself is srun's, which writes there.
        return os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - position, position)


def _open(log_dir: Path | None, name: str) -> BinaryIO:
    if log_dir is None:
        return tempfile.TemporaryFile()  # It has no name: nothing to remove, even if the head is killed.
    log_dir.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        try:
            return (log_dir / f"{name}-{number}.log").open("x+b")  # Two runs may be in the same job.
        except FileExistsError:
            continue
    raise AssertionError("there is always another number")


def describe_status(status: int) -> str:
    """Say in words what an exit status means, of a child process or as a shell passes it on."""
    number = -status if status < 0 else status - 128
    if number <= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exit status {status}"
