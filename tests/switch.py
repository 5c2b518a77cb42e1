"""A network whose links are slow, narrow, lossy or cut, as a test likes: `slow_network` and, as a program, the switch.

Every host gets a second device, `net0`, beside the one of `tests.hosts`. What the kernel sends there comes to the
switch, a process of its own, which drops packets or hands them on to their host when their time has come. So TCP on
both ends is the kernel's own. As a program it is told by lines of JSON what to do, and ends with its input.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.hosts import Host

_NETWORK = "10.89.0"
_MTU = 1500
_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_QUEUE_S = 0.2  # What would wait longer for a narrow link is dropped, as routers do.
_BATCH = 64
_TICK_S = 0.001  # Waking for every packet would take the hosts' cores from them.


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a link does to packets, each way."""

    delay_s: float = 0.0
    bits_per_s: float = 0.0  # 0: as many as the switch can.
    loss: float = 0.0
    is_up: bool = True


class Switch:
    """Controls the links of a network; each is named by its host, and joins it to the switch."""

    def __init__(self, process: subprocess.Popen[bytes], hosts: Sequence[Host]) -> None:
        self._process = process
        self._hosts = list(hosts)

    def address(self, host: Host) -> str:
        """Return a host's address on this network."""
        return _address(self._hosts.index(host) + 1)

    def set(self, line: Line, *hosts: Host) -> None:
        """Change the links of these hosts, or of all; returns when it is done."""
        self._ask({"hosts": [self._hosts.index(host) for host in hosts or self._hosts], "line": asdict(line)})

    def count_bytes(self, host: Host) -> int:
        """Return how many bytes, with all headers from IP on, a host has sent so far."""
        return int(self._ask({})["bytes"][self._hosts.index(host)])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def slow_network(hosts: Sequence[Host]) -> Iterator[Switch]:
    """Join hosts by one more network, whose links can be spoilt; all are perfect at first."""
    if not Path(_TUN).exists():
        pytest.skip(f"needs {_TUN}, by which the kernel hands packets to a program")
    command = [sys.executable, "-m", "tests.switch", *(host.namespace for host in hosts)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("The switch did not start; its last words are above.")
            yield Switch(process, hosts)
        finally:
            process.kill()


def _address(number: int) -> str:
    return f"{_NETWORK}.{number}"


class _Port:
    """One host's device, and the link it hangs on: a packet passes its sender's, then its receiver's."""

    def __init__(self, namespace: str, number: int) -> None:
        self.line = Line()
        self.num_bytes = 0
        self.busy_until = [0.0, 0.0]  # from the host, to the host
        self.device = _open_device(namespace)
        for command in (
            f"link set net0 mtu {_MTU} txqueuelen 1000 up",
            f"addr add {_address(number)}/24 dev net0",
        ):
            subprocess.run(["ip", "-n", namespace, *command.split()], check=True)

    def pass_through(self, size: int, now: float, direction: int, source: random.Random) -> float | None:
        """Return when a packet is through this link; None if it is lost."""
        line = self.line
        if not line.is_up or (line.loss and source.random() < line.loss):
            return None
        if line.bits_per_s:
            start = max(now, self.busy_until[direction])
            if start - now > _QUEUE_S:
                return None
            now = self.busy_until[direction] = start + size * 8 / line.bits_per_s
        return now + line.delay_s


def _open_device(namespace: str) -> int:
    host = Host("", "", namespace, Path(), None)
    with host.entered():
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"net0", _IFF_TUN | _IFF_NO_PI))
    return device


class _Switching:
    """The switch at work."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._ports = [_Port(namespace, number) for number, namespace in enumerate(namespaces, start=1)]
        self._by_address = {bytes(map(int, _address(n).split("."))): port for n, port in enumerate(self._ports, 1)}
        self._source = random.Random(0)
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, int, bytes]] = []

    def run(self, requests: BinaryIO, answers: BinaryIO) -> None:
        """Switch until there are no requests any more."""
        ports = {port.device: port for port in self._ports}
        watched = [requests.fileno(), *ports]
        rest = b""
        while True:
            timeout_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for descriptor in select.select(watched, [], [], timeout_s)[0]:
                if descriptor in ports:
                    self._read(ports[descriptor])
                    continue
                if not (data := os.read(descriptor, 65536)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    answers.write(json.dumps(self._obey(json.loads(line))).encode() + b"\n")
                    answers.flush()
            self._deliver()
            if self._waiting:
                time.sleep(_TICK_S)

    def _obey(self, request: dict[str, Any]) -> dict[str, Any]:
        for index in request.get("hosts", []):
            self._ports[index].line = Line(**request["line"])
        return {"bytes": [port.num_bytes for port in self._ports]}

    def _read(self, sender: _Port) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(sender.device, 65536)
            except BlockingIOError:
                return
            receiver = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if receiver is None:
                continue
            sender.num_bytes += len(packet)
            leaves_at = sender.pass_through(len(packet), time.monotonic(), 0, self._source)
            # The receiver's link is not slept for but planned ahead: it carries packets in the order of their arrival.
            arrives_at = None if leaves_at is None else receiver.pass_through(len(packet), leaves_at, 1, self._source)
            if arrives_at is not None:
                heapq.heappush(self._waiting, (arrives_at, next(self._order), receiver.device, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(self._waiting)
            with contextlib.suppress(BlockingIOError):  # The host's own queue is full: lost, as on any network.
                os.write(device, packet)


def main() -> None:
    """Join the namespaces that the command line names."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # Packets are late if the switch has to wait for the hosts' own work.
    switching = _Switching(sys.argv[1:])
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    switching.run(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
