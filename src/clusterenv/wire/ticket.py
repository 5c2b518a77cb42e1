"""The ticket: all a worker needs to find the head and be trusted by it."""

from __future__ import annotations

import base64
import binascii

import msgspec

from clusterenv.errors import ConfigError

TICKET_VARIABLE = "CLUSTERENV_TICKET"
WORKER_VARIABLE = "CLUSTERENV_WORKER"
SHOWN_VARIABLE = "CLUSTERENV_SHOWN"  # A descriptor of the head's standard error, if workers show their output.


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Where the head listens, and the keys needed to connect.

    Attributes:
        endpoint: A ZeroMQ address, e.g. `tcp://10.0.0.5:40123`, or `ipc:///tmp/clusterenv-x/head` on this machine.
        head_key: The head's public CURVE key (Z85); a worker does not talk to anyone else.
        public_key: The run's public key, for workers whose own key is not registered yet.
        secret_key: The matching secret key; its holder may register as an awaited worker, and nothing else.
        parent_pid: The head's process id if workers are its children and must end with it, else None.
        silence_s: After how many seconds of silence the head gives up a worker; workers are several times as patient.
        hang_s: A worker that finishes no step or reset for most of this time writes its Python stacks to its log.
    """

    endpoint: str
    head_key: str
    public_key: str
    secret_key: str
    parent_pid: int | None = None
    silence_s: float = 10.0
    hang_s: float = 300.0

    def __repr__(self) -> str:
        """Show the endpoint, but no keys."""
        return f"Ticket(endpoint={self.endpoint!r})"

    def encode(self) -> str:
        """Return the ticket as one line of text, fit for an environment variable or a file."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @staticmethod
    def decode(text: str) -> Ticket:
        """Read what `encode` wrote.

        Raises:
            ConfigError: The text is not a ticket.
        """
        try:
            return msgspec.msgpack.decode(base64.urlsafe_b64decode(text.encode()), type=Ticket)
        except (msgspec.DecodeError, binascii.Error, ValueError) as error:
            raise ConfigError(
                f"This is not a ticket ({error}). A worker takes its ticket from "
                f"${TICKET_VARIABLE}, as a launcher sets it."
            ) from error
