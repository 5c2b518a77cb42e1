"""Addresses: where the head listens, and which address workers are told."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq

from clusterenv.errors import ConfigError
from clusterenv.wire.endpoint import DIRECTORY_PREFIX, IPC, SOCKET_NAME, remove_endpoint

LOOPBACK = "127.0.0.1"
_EVERYWHERE = "0.0.0.0"
_EVERYWHERE_6 = "::"


@dataclass(frozen=True)
class Address:
    """A host and a port; port 0 stands for any free port."""

    host: str
    port: int = 0

    def __str__(self) -> str:
        """Format the address as ZeroMQ does."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def choose_addresses(listen: str | None, advertise: str | None, route_to: str | None) -> tuple[Address, Address] | None:
    """Decide where to listen, and which address to tell the workers.

    Args:
        listen: The user's setting, "HOST" or "HOST:PORT"; by default only the interface that routes to the workers.
        advertise: The user's setting; by default the address that routes to the workers.
        route_to: A host the workers run on; None if they run on this machine.

    Returns:
        Both addresses; port 0 in the second stands for the port that is bound. None if no network is needed.

    Raises:
        ConfigError: An address cannot be parsed, or no address of this machine routes to the workers.
    """
    told = None if advertise is None else _parse(advertise, "advertise")
    if listen is not None:
        bound = _parse(listen, "listen")
    elif told is not None:
        bound = Address(told.host if _is_ours(told.host) else _inner_address(told, route_to), told.port)
    elif route_to is not None:
        bound = Address(_source_address(route_to))
    else:
        return None
    if told is None:
        is_wildcard = bound.host in (_EVERYWHERE, _EVERYWHERE_6)
        told = Address(_source_address(route_to or LOOPBACK) if is_wildcard else bound.host)
    return bound, told


def make_local_endpoint() -> str | None:
    """Make a directory that only this user can enter, for the head's socket file; None if that is impossible."""
    if not zmq.has("ipc"):
        return None
    try:
        path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)) / SOCKET_NAME
    except OSError:
        return None
    endpoint = f"{IPC}{path}"
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        remove_endpoint(endpoint)
        return None
    return endpoint


def _parse(text: str, name: str) -> Address:
    try:
        socket.inet_pton(socket.AF_INET6, text)
        return Address(text)  # An IPv6 address contains colons; with a port it is written [::1]:5555.
    except OSError:
        pass
    host, separator, port = text.rpartition(":")
    if not separator:
        host, port = text, "0"
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} must be an address of this machine, 'HOST' or 'HOST:PORT', got {text!r}.")
    return Address(host, int(port))


def _source_address(target: str) -> str:
    """Return the address of this machine from which packets to the target leave. Nothing is sent."""
    try:
        family, _, _, _, destination = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)
            return str(probe.getsockname()[0])
    except OSError as error:
        found = _own_address()
        if found is None:
            raise ConfigError(
                f"Cannot tell which address of this machine leads to {target} ({error}). "
                "Pass ClusterEnv(network=Network(listen=...)): an address of this machine that the workers can reach."
            ) from error
        return found


def _inner_address(told: Address, route_to: str | None) -> str:
    """Return the address to listen on if workers are told another machine's, which forwards to this one."""
    if route_to is not None:
        return _source_address(route_to)
    raise ConfigError(
        f"advertise={told.host!r} is not an address of this machine, so it does not say where to listen. "
        "Pass ClusterEnv(network=Network(listen=..., advertise=...)): listen is the address of this machine that the "
        "other one forwards to, or 0.0.0.0 for all of them."
    )


def _own_address() -> str | None:
    """Return an address of this machine's host name, other than the loopback that Debian writes into /etc/hosts."""
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)
    except OSError:
        return None
    addresses = {str(entry[4][0]) for entry in entries}
    return next((address for address in sorted(addresses) if not address.startswith("127.")), None)


def _is_ours(host: str) -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
