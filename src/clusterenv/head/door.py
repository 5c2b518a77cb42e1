"""Door: how workers come in: who may join, who is sent away and why, and how long the head waits for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from clusterenv.errors import LaunchError, WireError
from clusterenv.head.roster import Member, Roster
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages
from clusterenv.wire.complaints import Complaints
from clusterenv.wire.messages import PROTOCOL, Join, Ping, Refused
from clusterenv.wire.versions import find_conflict, installed_versions
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

_SLICE_S = 0.1
_REMIND_S = 30.0  # How often to say again what is waited for.


class Door:
    """Lets workers in."""

    def __init__(self, socket: HeadSocket, fleet: Fleet, roster: Roster) -> None:
        self._socket = socket
        self._fleet = fleet
        self._roster = roster
        self._versions = installed_versions()
        self._misfit: tuple[int, str] | None = None
        self._heirs: dict[int, tuple[bytes, Join]] = {}
        self._refusals = Complaints(log)

    def welcome(self, peer: bytes, join: Join) -> None:
        """Let a worker in, or tell it why not."""
        if join.protocol != PROTOCOL:
            reason = f"it speaks protocol {join.protocol}, the head {PROTOCOL}: install the head's clusterenv there"
        else:
            reason = find_conflict(self._versions, join.versions)
        if reason:
            self._misfit = join.worker_index, reason
        elif self._is_heir(join):
            self._heirs[join.worker_index] = peer, join
            return
        else:
            try:
                member = self._roster.join(join.worker_index, peer, join.pid, join.hostname)
            except WireError as error:
                reason = str(error)
            else:
                log.info("%s joined", member)
                return
        self._refusals.note("refused a worker (pid %d on %s): %s", join.pid, join.hostname, reason)
        self._socket.send(peer, [messages.encode(Refused(reason))], waits=False)

    def admit_heir(self, member: Member) -> None:
        """Let in the one who has come in the place of a worker that was lost and has now been given up, if any has."""
        if member.index in self._heirs:
            self.welcome(*self._heirs.pop(member.index))

    def _is_heir(self, join: Join) -> bool:
        """Whether the worker of this number is gone, and nobody has noticed yet, so that this is its successor.

        A job that was requeued while the learner learned, or a worker that came back after its connection was lost.
        """
        member = self._roster.find_index(join.worker_index)
        if member is None or member.peer is None:
            return False
        return not self._socket.send(member.peer, [messages.encode(Ping())], waits=False)

    def await_members(
        self,
        pump: Callable[[float], bool],
        members: Sequence[Member],
        timeout_s: float,
        at_least: int | None = None,
    ) -> None:
        """Wait until these workers have joined, saying now and then what is waited for.

        Args:
            pump: Deals with a message if one comes within so many seconds; returns whether one did.
            members: Whom to wait for.
            timeout_s: How long.
            at_least: How many of them are enough; by default all.

        Raises:
            LaunchError: One ended instead or does not fit the head, or they took too long.
        """
        started = said_at = looked_at = time.monotonic()
        said = ""
        self._misfit = None
        spare = 0 if at_least is None else len(members) - at_least
        while len(missing := [member for member in members if member.peer is None]) > spare:
            has_news = pump(_SLICE_S)
            now = time.monotonic()
            if has_news and now - looked_at < _SLICE_S:
                continue  # Asking the launcher about all workers takes longer than letting one in.
            looked_at = now
            self._check_ends(missing)
            status = self._fleet.status()
            if status and (status != said or now - said_at > _REMIND_S):
                said, said_at = status, now
                log.warning("waiting for %d of %d workers: %s", len(missing), len(members), status)
            if now - started > timeout_s:
                names = ", ".join(str(member.index) for member in missing)
                raise LaunchError(
                    f"Only {len(members) - len(missing)} of {len(members)} workers joined within {timeout_s:g} s. "
                    f"Missing: {names}. {f'{status}. ' if status else ''}{log_of(self._fleet, missing[0])} "
                    f"Workers must reach {self._socket.ticket.endpoint}; if that address is not routable from them, "
                    "pass ClusterEnv(listen=..., advertise=...). Timeouts(join_s=...) gives them longer."
                )

    def _check_ends(self, missing: list[Member]) -> None:
        if self._misfit is not None and any(member.index == self._misfit[0] for member in missing):
            raise LaunchError(f"Worker {self._misfit[0]} cannot join: {self._misfit[1]}.")
        exits = self._fleet.exits()
        for member in missing:
            if member.peer is None and member.index in exits:
                raise LaunchError(
                    f"Worker {member.index} ended ({exits[member.index]}) before it joined. "
                    f"{log_of(self._fleet, member)}"
                )


def log_of(fleet: Fleet, member: Member) -> str:
    """Return the end of a worker's log, introduced."""
    tail = fleet.log_tail(member.index)
    return f"The last lines of its log are:\n{tail}\n" if tail else "Its log is empty."
