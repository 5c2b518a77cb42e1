"""Diagnosis: if workers did not come up, which step failed, and what to do next."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from clusterenv.errors import ClusterEnvError, ConfigError
from clusterenv.launchers.base import Fleet, Launcher
from clusterenv.wire.ticket import Ticket

# The steps of starting workers, in order, and what is true once each is done.
STEPS = {
    "start": "workers are started",
    "python": "Python and clusterenv start there",
    "reach": "workers reach this machine",
    "versions": "the versions of both sides fit together",
}

# A pattern in an error, a worker's log or its exit; the step that failed; and the remedy.
_SIGNS = [
    (
        r"Could not resolve hostname (\S+?): |hosts names (\S+?),? .*no such host is known",
        "start",
        r"No host is called \1\2: correct --hosts, or give it that name in ~/.ssh/config.",
    ),
    (
        r"connect to host (\S+) port (\d+): Connection refused",
        "start",
        r"\1 is there, but no ssh server listens at its port \2: start sshd there, or name the right port with "
        "--ssh-options=-p --ssh-options=PORT.",
    ),
    (
        r"connect to host (\S+) port (\d+): (?:Connection timed out|No route to host|Network is unreachable)",
        "start",
        r"\1 does not answer at port \2: see whether it is up, and whether a firewall or a missing VPN is between.",
    ),
    (
        r"Host key verification failed",
        "start",
        "Log in once by hand with `ssh`, compare the key it shows, and accept it.",
    ),
    (
        r"You lack rights in namespace|You may not \w+ \S+ in namespace",
        "start",
        "Have the Role bound to you that `clusterenv launch kubernetes --head SCRIPT` prints.",
    ),
    (
        r"There is no cluster|The cluster at \S+ (cannot be reached|does not accept)|[Tt]he kubeconfig",
        "start",
        "Make `kubectl get pods` work first; --context chooses among clusters.",
    ),
    (r"its image cannot be pulled", "start", "Push the image, and let the nodes pull it: --image-pull-secrets."),
    (r"Its image has no clusterenv", "python", "Build the image with clusterenv: see docs/how-to/kubernetes.md."),
    (
        r"(nobody listens at|cannot be reached from)(.|\n)*The events of Pod",
        "reach",
        "Pods cannot reach this machine. Run the head in the cluster: `clusterenv launch kubernetes --image IMAGE "
        "--head SCRIPT | kubectl apply -f -`. Or give --listen an address of this machine in the cluster's network (a "
        "VPN's), --advertise the one that Pods see, and let the port through any firewall.",
    ),
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
        "Install clusterenv-rl for that Python, name another with --python, or activate an environment with --setup.",
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

_INDENT = " " * 21
_WRAP = 100


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: What was checked, in a word or two.
        is_ok: Whether it is as it should be.
        text: What was seen or measured.
        next_step: What to do about it, if it is not ok.
    """

    subject: str
    is_ok: bool
    text: str
    next_step: str = ""

    def __str__(self) -> str:
        """Format the finding as a line, with the next step below."""
        first, *more = self.text.strip().splitlines()
        if self.next_step:
            more += textwrap.wrap(f"next: {self.next_step}", _WRAP)
        head = f"{'ok' if self.is_ok else 'failed':7} {self.subject:13}{first}"
        return "\n".join([head, *(_INDENT + text for text in more)])


class Witness(Launcher):
    """Launches as another launcher does, and remembers what became of the workers after the head has stopped them.

    `queues` stays False even if the launcher's is True: the doctor's environment is known to work, and needs no trial.

    Attributes:
        endpoint: The head's address as given to the workers; None before the launch.
        has_started: Whether the launcher succeeded.
        exits: How the workers that ended on their own ended.
        tails: The last lines of all workers' logs.
        status: What workers were last waiting for.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.endpoint: str | None = None
        self.has_started = False
        self.exits: dict[int, str] = {}
        self.tails: dict[int, str] = {}
        self.status = ""
        self._launcher = launcher

    @property
    def suggested_workers(self) -> int | None:
        return self._launcher.suggested_workers

    @property
    def route_to(self) -> str | None:
        return self._launcher.route_to

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        """Launch the workers, and watch the fleet."""
        self.endpoint = ticket.endpoint
        fleet = self._launcher.launch(ticket, num_workers)
        self.has_started = True
        return _WatchedFleet(fleet, self, num_workers)

    def render(self, num_workers: int) -> str:
        return self._launcher.render(num_workers)


def diagnose(error: ClusterEnvError, witness: Witness) -> Iterator[Finding]:
    """Yield the steps that succeeded, the one that failed, and what to do about it."""
    failed, next_step = _find_failure(error, witness)
    for subject, text in STEPS.items():
        if subject == failed:
            yield Finding(subject, False, str(error), next_step)
            return
        yield Finding(subject, True, text)


def _find_failure(error: ClusterEnvError, witness: Witness) -> tuple[str, str]:
    if isinstance(error, ConfigError):
        return "start", "Correct what is named above."
    # The error comes first: each worker may have failed in its own way.
    for said in (str(error), "\n".join([*witness.exits.values(), *witness.tails.values()])):
        for pattern, subject, remedy in _SIGNS:
            if sign := re.search(pattern, said):
                return subject, sign.expand(remedy)
    if not witness.has_started:
        return "start", "Correct what was refused; `clusterenv launch ... --dry-run` shows what is run."
    if witness.exits:
        return "python", "Its log says why it ended. Run the same command there by hand: clusterenv launch --dry-run."
    if witness.status:
        return "start", f"They were not up in time ({witness.status}). Wait longer with --timeout, or ask for less."
    return "reach", (
        f"They run, but were not heard of. From a machine of theirs {witness.endpoint} must be reachable: try another "
        "--listen or --advertise, and look for a firewall. If they only start slowly, wait longer with --timeout."
    )


class _WatchedFleet:
    def __init__(self, fleet: Fleet, witness: Witness, num_workers: int) -> None:
        self._fleet = fleet
        self._witness = witness
        self._num_workers = num_workers
        self.exits = fleet.exits
        self.log_tail = fleet.log_tail
        self.restart = fleet.restart

    def status(self) -> str:
        self._witness.status = self._fleet.status()
        return self._witness.status

    def stop(self, timeout_s: float) -> None:
        self._witness.exits = self._fleet.exits()
        self._witness.tails = {index: self._fleet.log_tail(index) for index in range(self._num_workers)}
        self._fleet.stop(timeout_s)
