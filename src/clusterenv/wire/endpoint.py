"""Endpoints: what a worker knows of the head's address: its socket file, and whether anybody listens there.

Only the standard library: a worker's guardian, which is to stay small, needs this too.
"""

from __future__ import annotations

import contextlib
import socket as sockets
from pathlib import Path
from urllib.parse import urlsplit

_REFUSED_S = 2.0  # Connections are refused: the head's process has ended.
_PATIENCE = 6  # No answer at all for this many times `silence_s`: the head's machine is off, or the network cut.
_CONNECT_S = 2.0

IPC = "ipc://"
DIRECTORY_PREFIX = "clusterenv-"
SOCKET_NAME = "head"


def socket_file(endpoint: str) -> Path | None:
    """Return the socket file that an endpoint stands for; None if it is an address of the network."""
    return Path(endpoint.removeprefix(IPC)) if endpoint.startswith(IPC) else None


def remove_endpoint(endpoint: str) -> None:
    """Remove the head's socket file and its directory, if they are still there. Other endpoints are left alone."""
    path = socket_file(endpoint)
    if path is None or path.name != SOCKET_NAME or not path.parent.name.startswith(DIRECTORY_PREFIX):
        return
    with contextlib.suppress(OSError):  # Several workers may do this at once, and after the head has.
        path.unlink(missing_ok=True)
        path.parent.rmdir()


class ReachabilityProbe:
    """Makes test connections to one address, and remembers since when none has succeeded.

    Attributes:
        patience_s: How long nobody may answer there before there is no hope any more.
        problem: Why nobody answers; empty if somebody does, or the machine says that nobody listens.
    """

    def __init__(self, endpoint: str, silence_s: float) -> None:
        """Remember where to connect.

        Args:
            endpoint: A ZeroMQ address, `tcp://` or `ipc://`.
            silence_s: After how many seconds of silence the head gives a worker up; this side is more patient.
        """
        self._endpoint = endpoint
        self.patience_s = _PATIENCE * silence_s
        self.problem = ""
        self._refused_since: float | None = None
        self._silent_since: float | None = None

    def forget(self) -> None:
        """Begin anew: the head was heard of in another way."""
        self._refused_since = self._silent_since = None
        self.problem = ""

    def try_once(self, now: float) -> str:
        """Try once; returns why there is no hope any more, or nothing while there is."""
        try:
            self._connect()
        except (ConnectionRefusedError, FileNotFoundError):  # The latter for `ipc://`: the head has tidied up.
            self._silent_since = None
            self.problem = ""
            if self._refused_since is None:
                self._refused_since = now
            elif now - self._refused_since >= _REFUSED_S:
                remove_endpoint(self._endpoint)
                here = " or is on another machine, and needs ClusterEnv(network=Network(listen=...))"
                hint = "" if socket_file(self._endpoint) is None else here
                return f"nobody listens at {self._endpoint}: the head has ended{hint}"
        except OSError as error:
            self._refused_since = None
            self.problem = f"{self._endpoint} cannot be reached from {sockets.gethostname()} ({error})"
            if self._silent_since is None:
                self._silent_since = now
            elif now - self._silent_since >= self.patience_s:
                return (
                    f"{self.problem}. If the head has another address for this network, pass it on the head: "
                    "ClusterEnv(network=Network(listen=..., advertise=...))"
                )
        else:
            self.forget()
        return ""

    def _connect(self) -> None:
        path = socket_file(self._endpoint)
        if path is None:
            address = urlsplit(self._endpoint)
            sockets.create_connection((address.hostname or "", address.port or 0), _CONNECT_S).close()
            return
        with sockets.socket(sockets.AF_UNIX) as caller:
            caller.settimeout(_CONNECT_S)
            caller.connect(str(path))
