"""A worker that holds a valid ticket and does not keep to the protocol: first it says nonsense, then the truth.

Run as a program by `tests/test_wire.py`, in place of `python -m clusterenv.worker`. It hosts no environment: every
observation it sends is 7.
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import zmq

from clusterenv.wire import messages, values
from clusterenv.wire.compatibility import installed_versions
from clusterenv.wire.messages import (
    PROTOCOL,
    Assign,
    Join,
    Made,
    Ready,
    Register,
    Registered,
    Reset,
    Returned,
    Serve,
    Step,
    Stepped,
    Stop,
)
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket

NUM_ENVS = 2


def describe() -> dict[str, Any]:
    env = gym.make("CartPole-v1")
    return {
        "observation_spaces": [env.observation_space],
        "action_space": env.action_space,
        "metadata": {},
        "render_mode": None,
    }


def main() -> None:
    ticket = Ticket.decode(os.environ[TICKET_VARIABLE])
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey = ticket.head_key.encode()
    socket.curve_publickey = ticket.public_key.encode()
    socket.curve_secretkey = ticket.secret_key.encode()
    socket.connect(ticket.endpoint)
    index = int(os.environ[WORKER_VARIABLE])
    public, secret = zmq.curve_keypair()
    socket.send(messages.encode(Register(PROTOCOL, index, public.decode())))
    assert isinstance(messages.decode_request(socket.recv()), Registered)
    socket.disconnect(ticket.endpoint)
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.connect(ticket.endpoint)
    socket.send(messages.encode(Join(PROTOCOL, index, os.getpid(), "rogue", installed_versions())))
    rows: list[Any] = [
        np.full((NUM_ENVS, 4), 7, np.float32),
        np.zeros(NUM_ENVS),
        np.zeros(NUM_ENVS, bool),
        np.zeros(NUM_ENVS, bool),
    ]
    while socket.poll(30_000):
        request = messages.decode_request(socket.recv_multipart()[0])
        if isinstance(request, Stop):
            break
        if isinstance(request, Assign):
            socket.send(messages.encode(Made(request.call, values.dumps(describe()))))
        elif isinstance(request, Serve):
            socket.send(messages.encode(Ready(request.call, shares_memory=False)))
        elif isinstance(request, Step | Reset):
            truth = messages.encode(Stepped(request.call, None, None))
            socket.send(b"")
            socket.send(b"\x80\x04 this is a pickle, perhaps")
            socket.send(messages.encode(request))  # the head's own words back
            socket.send(messages.encode(Join(PROTOCOL, 0, 1, "an impostor", installed_versions())))
            socket.send(messages.encode(Stepped(request.call - 1, None, None)))  # an answer to another call
            socket.send(messages.encode(Returned(request.call + 1, b"")))
            socket.send(truth)  # no arrays
            socket.send_multipart([truth, *rows, rows[0]])  # too many
            socket.send_multipart([truth, rows[0][:1], *rows[1:]])  # too small
            socket.send_multipart([truth, *reversed(rows)])  # in the wrong order
            socket.send_multipart([truth, *rows])
            socket.send_multipart([truth, *rows])  # a second time
    socket.close()
    context.term()


if __name__ == "__main__":
    main()
