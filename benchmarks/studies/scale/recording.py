"""What a real worker answered to each kind of request, for light workers to say again."""

from pathlib import Path
from typing import Any

import msgspec

from clusterenv.wire import messages, values
from clusterenv.wire.messages import Collected, Request

Said = tuple[bytes, list[bytes]]  # A message: its header, and its arrays.


class Recording(msgspec.Struct, frozen=True):
    """A worker's newest answer to each kind of request: one message, or several for a rollout."""

    answers: dict[str, list[Said]]

    def answer_to(self, kind: type[Request]) -> list[tuple[Any, list[bytes]]]:
        """Return the replies to a request of this kind, with their arrays."""
        return [(messages.decode_reply(header), arrays) for header, arrays in self.answers[kind.__name__]]

    @staticmethod
    def probes(reply: Collected, count: int) -> bytes | None:
        """Return what a worker says of its actions at so many of the rows that were recorded."""
        if reply.probes is None or not count:
            return None
        said = values.loads(reply.probes)
        arrays = {name: array[:count] for name, array in said["arrays"].items()}
        return values.dumps({**said, "rows": said["rows"][:count], "arrays": arrays})

    @property
    def rollout_bytes(self) -> int:
        """The bytes of one rollout, headers included."""
        return sum(len(header) + sum(map(len, arrays)) for header, arrays in self.answers["Collect"])

    @property
    def rollout_messages(self) -> int:
        """The messages of one rollout."""
        return len(self.answers["Collect"])

    @staticmethod
    def read(path: Path) -> "Recording":
        """Read what `record` wrote."""
        return msgspec.msgpack.decode(path.read_bytes(), type=Recording)
