"""What Slurm is given to run: the shell of one worker, and the job around the step with all workers.

The ticket is in neither: it travels in the environment of `sbatch` or `srun`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterenv.wire.ticket import WORKER_VARIABLE

SAYS = "clusterenv:"  # How the lines begin that the head reads in a log.
ANY_WORKER = "$SLURM_PROCID"  # In a step with all workers, the index of each.

_LOOK_S = 5  # How often a job that has lost its first workers looks whether others are left.

STEP = (
    "srun",
    "--export=ALL",  # Not what sbatch was told: the setup may have changed the environment since.
    "--input=none",
    "--label",  # Whose line it is.
    "--mpi=none",
    "--kill-on-bad-exit=0",  # A worker that dies takes nobody with it,
    "--wait=0",
    "--no-kill",  # nor does a node.
)


def single_step(job_id: str, node: str | None) -> list[str]:
    """Return the beginning of a command that runs something once in a job that runs, beside its other steps."""
    label = ["--label"]  # There is nobody to be told apart from.
    where = [] if node is None else [f"--nodelist={node}"]
    own = [f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", *where]
    return [*(word for word in STEP if word not in label), *own]


def worker_script(worker: str, variables: Mapping[str, str], setup: Sequence[str], python: str) -> str:
    """Return the shell script that runs one worker, and says where it starts and how it ends.

    Args:
        worker: The worker's index, or `ANY_WORKER`.
        variables: What to export. The setup comes later and may change it.
        setup: The user's own lines; each must succeed.
        python: A path, or a command that the setup makes known.
    """
    lines = [f"export {WORKER_VARIABLE}={worker}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [
        f'echo "{SAYS} worker ${WORKER_VARIABLE} starts on $SLURMD_NODENAME in process group $$"',
        f'report() {{ echo "{SAYS} worker ${WORKER_VARIABLE} ended with status $?"; }}',
        "trap report EXIT",
        # The worker gets the signal too. This shell outlives it, to report.
        f'warn() {{ echo "{SAYS} SIGTERM: the job was cancelled or preempted, or its time limit is near"; }}',
        "trap warn TERM",
    ]
    for number, line in enumerate(setup, start=1):
        lines += [line, f'[ $? -eq 0 ] || {{ echo "{SAYS} line {number} of the setup failed"; exit 1; }}']
    lines.append(f"{shlex.quote(python)} -m clusterenv.worker")
    return "\n".join(lines) + "\n"


def job_script(step: Sequence[str], log_dir: Path) -> str:
    """Return the batch script of a job that runs this step, and stays for workers that were started again beside it.

    Those are steps of their own. If the job ended with the last worker that came with it, it would take them all with
    it.

    It writes to the log directory if the node it runs on has it too, and else where `sbatch --output` says.
    """
    directory = shlex.quote(str(log_dir))
    return (
        "#!/bin/bash\n"
        f'[ -d {directory} ] && exec >>{directory}/"job-$SLURM_JOB_ID.log" 2>&1\n'
        f'echo "{SAYS} job $SLURM_JOB_ID starts on $SLURM_JOB_NODELIST"\n'
        f"{shlex.join(step)}\n"
        "status=$?\n"
        'while squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -q "\\.[0-9]"; do\n'
        f"    sleep {_LOOK_S}\n"
        "done\n"
        "exit $status\n"
    )
