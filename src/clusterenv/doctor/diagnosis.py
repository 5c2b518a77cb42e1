"""Diagnosis: workers did not come up; which step of the way failed, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clusterenv.doctor.finding import Finding
from clusterenv.doctor.witness import Witness
from clusterenv.errors import ClusterEnvError, ConfigError

# The steps of the way, in order, and what is true once each is done.
STEPS = {
    "start": "workers are started",
    "python": "Python and clusterenv start there",
    "reach": "workers reach this machine",
    "versions": "the versions of both sides fit together",
}

# What a worker's log or its end says, the step that failed, and the remedy.
_SIGNS = [
    (
        r"ssh could not connect to (\S+?),",
        "start",
        r"Try `ssh -o BatchMode=yes \1 true` until it works without a password or a question.",
    ),
    (r"ssh lost the connection to (\S+?),", "start", r"See whether \1 is up, and whether it ends idle sessions."),
    (r"line \d+ of the setup failed", "start", "Correct --setup: the lines are run by a shell there."),
    (
        r"No module named ['\"]?clusterenv",
        "python",
        "Install clusterenv for that Python, name another with --python, or activate an environment with --setup.",
    ),
    (
        r"exit status 12[67]|[Nn]o such file or directory|command not found",
        "python",
        "Name the Python there with --python, or make it known with --setup (`module load`, `source .../activate`).",
    ),
    (
        r"nobody listens at|cannot be reached from",
        "reach",
        "Give --listen an address of this machine that the workers' machines can reach (and --advertise the one they "
        "see, behind a NAT), and let the port through any firewall: --listen ADDRESS:PORT fixes it.",
    ),
    (r"cannot join|refused this worker", "versions", "Install the same versions on both sides."),
]


def diagnose(error: ClusterEnvError, witness: Witness) -> Iterator[Finding]:
    """Tell which steps workers got through, which one they did not, and what to do about it."""
    failed, next_step = _find_failure(str(error), witness)
    if isinstance(error, ConfigError):
        failed, next_step = "start", "Correct what is named above."
    elif not witness.has_started:
        failed, next_step = "start", "Correct what was refused; `clusterenv launch ... --dry-run` shows what is run."
    for subject, text in STEPS.items():
        if subject == failed:
            yield Finding(subject, False, str(error), next_step)
            return
        yield Finding(subject, True, text)


def _find_failure(message: str, witness: Witness) -> tuple[str, str]:
    said = "\n".join([message, *witness.exits.values(), *witness.tails.values()])
    for pattern, subject, remedy in _SIGNS:
        if sign := re.search(pattern, said):
            return subject, sign.expand(remedy)
    if witness.exits:
        return "python", "Its log says why it ended. Run the same command there by hand: clusterenv launch --dry-run."
    if witness.status:
        return "start", f"They were not up in time ({witness.status}). Wait longer with --timeout, or ask for less."
    return "reach", (
        f"They run, but were not heard of. From a machine of theirs {witness.endpoint} must be reachable: try another "
        "--listen or --advertise, and look for a firewall. If they only start slowly, wait longer with --timeout."
    )
