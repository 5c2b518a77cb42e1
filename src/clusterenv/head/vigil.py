"""Vigil: finds out which workers are lost: by their launcher's word, or because nothing can be sent to them."""

from __future__ import annotations

from collections.abc import Sequence

from clusterenv.head.roster import Member
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages
from clusterenv.wire.messages import Ping
from clusterenv.wire.zeromq import HeadSocket

_SUSPICION_S = 3.0  # After a connection has ended, how long to go on asking whose it was.
_LAST_WORDS_S = 1.0  # How long the launcher gets to say how a worker ended whose connection has.


class Vigil:
    """Watches over the workers of one run."""

    def __init__(self, socket: HeadSocket, fleet: Fleet, everyone: Sequence[Member], silence_s: float) -> None:
        self._socket = socket
        self._everyone = everyone
        self._fleet = fleet
        self._silence_s = silence_s
        self._suspicious_until = 0.0
        self._cut_since: dict[int, float] = {}

    def suspect(self, now: float) -> None:
        """Note that somebody may have gone."""
        self._suspicious_until = now + _SUSPICION_S

    def look(self, members: Sequence[Member], now: float) -> list[tuple[Member, str]]:
        """Return those of these workers that are lost, and why."""
        exits = self._fleet.exits()
        self._find_cut_off(now)
        lost = []
        for member in members:
            since = self._cut_since.get(member.index, now)
            if member.index in exits and (member.index in self._cut_since or not member.has_rival):
                lost.append((member, f"it ended ({exits[member.index]})"))
            elif now - since > _LAST_WORDS_S:
                lost.append((member, f"its connection was lost (silent for {self._silence_s:g} s, or closed)"))
        return lost

    def forget(self, member: Member) -> None:
        """Note that a worker was given up: whoever comes in its place starts with a clean sheet."""
        self._cut_since.pop(member.index, None)

    def _find_cut_off(self, now: float) -> None:
        """Find out whose connection has ended: ZeroMQ says that one has, and then refuses to send to it."""
        if self._socket.count_hangups():
            self.suspect(now)
        if now > self._suspicious_until:
            return
        # Also those that nobody waits for just now: the event is not repeated when somebody does.
        for member in self._everyone:
            if member.peer is None or member.index in self._cut_since:
                continue
            # A worker that shares memory does not read its socket for hours: one more ping must not wait for that.
            if not self._socket.send(member.peer, [messages.encode(Ping())], waits=False):
                self._cut_since[member.index] = now
