"""Endpoints: the head's address as a worker sees it: its socket file, and whether anything listens there.

Imports only the standard library, because a worker's guardian, which must stay small, needs this too.
"""

from __future__ import annotations

import contextlib
import socket as sockets
from pathlib import Path
from urllib.parse import urlsplit

_REFUSED_S = 2.0  # After connections were refused for this long, the head's process has ended.
_PATIENCE = 6  # After no answer for this many times `silence_s`, the head's machine or the network is down.
_CONNECT_S = 2.0

IPC = "ipc://"
DIRECTORY_PREFIX = "clusterenv-"
SOCKET_NAME = "head"


def socket_file(endpoint: str) -> Path | None:
    """Return the socket file that an endpoint stands for; None if it is a network address."""
    return Path(endpoint.removeprefix(IPC)) if endpoint.startswith(IPC) else None


def remove_endpoint(endpoint: str) -> None:
    """Remove the head's socket file and its directory, if they are still there. Other endpoints are left alone."""
    path = socket_file(endpoint)
    if path is None or path.name != SOCKET_NAME or not path.parent.name.startswith(DIRECTORY_PREFIX):
        return
    with contextlib.suppress(OSError):  # Several workers may do this at once, or after the head has done it.
        path.unlink(missing_ok=True)
        path.parent.rmdir()


class ReachabilityProbe:
    """Makes test connections to one address, and remembers since when none has succeeded.

    Attributes:
        patience_s: How long to wait for an answer before giving up.
        problem: Why there is no answer; empty if there is one, or if the machine refuses the connection.
    """

    def __init__(self, endpoint: str, silence_s: float) -> None:
        """Remember where to connect.

        Args:
            endpoint: A ZeroMQ address, `tcp://` or `ipc://`.
            silence_s: After how many seconds of silence the head gives up a worker; this side is more patient.
        """
        self._endpoint = endpoint
        self.patience_s = _PATIENCE * silence_s
        self.problem = ""
        self._refused_since: float | None = None
        self._silent_since: float | None = None

    def forget(self) -> None:
        """Start over, because there was another sign of the head."""
        self._refused_since = self._silent_since = None
        self.problem = ""

    def try_once(self, now: float) -> str:
        """Try once; returns why to give up, or "" while there is hope."""
        try:
            self._connect()
        except (ConnectionRefusedError, FileNotFoundError):  # With `ipc://`, the head may have removed the file.
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
