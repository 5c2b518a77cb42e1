"""The messages: what head and workers say to each other.

Each message is a small struct, encoded as a MessagePack array whose first element says which message it is. A request
carries the number of its call and its reply repeats it, so that an answer can never be mistaken for the answer to
another call. Values of any shape (infos, results) are embedded as bytes of `wire.values`; code is embedded as bytes of
cloudpickle, and only ever sent from the head to the workers.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from clusterenv.errors import WireError
from clusterenv.wire.info_planes import MAX_GENERATION

PROTOCOL = 8

# Shown to people in errors and logs, so a single short line.
Name = Annotated[str, Meta(max_length=255, pattern=r"\A[ -~]*\Z")]
Key = Annotated[str, Meta(pattern=r"\A[!-~]{40}\Z")]  # a public CURVE key in Z85


Packages = Annotated[dict[Name, Name], Meta(max_length=1000)]  # imported modules and their versions

# Whose code raised. "function" is one that was given to `ClusterEnv.apply`.
Where: TypeAlias = Literal["environment", "policy", "factory", "function"]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shared memory for any worker that can open it."""

    address: str
    nonce: bytes  # the first bytes of the memory, so that no other memory is opened by mistake


class BoardAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a worker keeps weights for others on its machine; see `wire.board`."""

    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    descriptor: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]  # the first bytes of the board


class Copy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The one copy of a version's weights for all workers of a machine.

    It tells the board's owner to put the weights that follow on its board, and tells other workers, which are not sent
    the weights, to read them there.
    """

    board: BoardAddress
    size_bytes: int
    digest: bytes  # SHA-256 of the weights


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One named array of a rollout, without its leading [steps, environments]."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Assign(_Message, tag=1, frozen=True):
    """Head to worker: make the environments of this shard. Answered by Made."""

    call: int
    code: bytes  # cloudpickle of a `wire.assignment.Assignment`


class Serve(_Message, tag=14, frozen=True):
    """Head to worker: the spaces of the run, and where its step buffers are. Answered by Ready."""

    call: int
    spaces: bytes  # cloudpickle of a `wire.assignment.RunSpaces`
    memory: Offer | None  # the bell and the step buffers; None: send arrays over the socket
    mailbox: Offer | None  # for this worker alone
    neighbour: BoardAddress | None = None  # the board of a worker that may be on the same machine, to try to read


class Reset(_Message, tag=2, frozen=True):
    """Head to worker: reset the shard, or the environments in the mask."""

    call: int
    buffer: int  # which of the two step buffers to fill
    seeds: list[int | None]
    mask: list[bool] | None
    options: bytes | None  # cloudpickle


class Step(_Message, tag=3, frozen=True):
    """Head to worker: step every environment once."""

    call: int
    buffer: int  # which of the two step buffers to fill
    actions: bytes | None  # pickle; None: they are in the action arrays


class Invoke(_Message, tag=4, frozen=True):
    """Head to worker: call a method, or read an attribute, of every environment."""

    call: int
    name: str
    arguments: bytes  # cloudpickle of (args, kwargs)


class SetAttribute(_Message, tag=5, frozen=True):
    """Head to worker: set an attribute of every environment."""

    call: int
    name: str
    values: bytes  # cloudpickle of a list, one value per environment


class Stop(_Message, tag=6, frozen=True):
    """Head to worker: close the environments and end."""


class Refused(_Message, tag=7, frozen=True):
    """Head to worker: you cannot join, for this reason."""

    reason: str


class Adopt(_Message, tag=8, frozen=True):
    """Head to worker: this is the policy's structure, and its first weights."""

    call: int
    code: bytes  # cloudpickle of (pickled policy, weights spec)
    version: int
    weights: Offer | None  # memory for the weights of this and later versions; None: they follow as frames
    arguments: bytes | None  # cloudpickle: per-call values to try the policy with
    copy: Copy | None = None  # the board on this machine that gets the weights


class Collect(_Message, tag=10, frozen=True):
    """Head to worker: make a rollout; new weights, if any, are in the weights' memory or follow as frames."""

    call: int
    num_steps: int
    num_probes: int  # at how many rows to report how actions were distributed; 0: none
    version: int | None  # of the new weights; None: keep the current ones
    arguments: bytes | None  # cloudpickle: per-call values
    memory: Offer | None  # where to put the rollout; None: send it as frames
    is_own: bool = False  # whether it belongs to a stream, so that the memory is for this shard's columns only
    record: int | None = None  # its number in a recording: all but the last step stays on the worker
    copy: Copy | None = None  # as with Adopt


class Decide(_Message, tag=11, frozen=True):
    """Head to worker: choose actions and step once; new weights as with Collect."""

    call: int
    buffer: int  # which of the two step buffers to fill
    version: int | None
    arguments: bytes | None  # cloudpickle: per-call values
    num_probes: int  # as with Collect
    copy: Copy | None = None  # as with Adopt


class Record(_Message, tag=35, frozen=True):
    """Head to worker: from now on record rollouts in this directory. Answered by Returned."""

    call: int
    directory: str | None  # None: stop recording
    about: bytes  # values: a dict that describes the run
    incarnation: int  # how many processes have joined as this worker


class Ping(_Message, tag=12, frozen=True):
    """Head to worker: nothing. It is sent to find out whether the worker is still connected."""


class Resume(_Message, tag=13, frozen=True):
    """Head to worker: you replace a worker that was lost; this is what the learner saw last.

    The next step is answered as if it had truncated these episodes, in the way of the autoreset mode. A rollout begins
    with the new episodes instead.
    """

    call: int
    buffer: int  # which of the two step buffers the learner saw last
    seeds: list[int]  # what to reset the environments with
    seen: bytes  # values: one array per leaf, a list of objects for a leaf without a fixed size
    ended: list[bool]  # which episodes had already ended


class Cancel(_Message, tag=15, frozen=True):
    """Head to worker: drop the rollouts requested before this that have not begun. Answered by Returned."""

    call: int


class Load(_Message, tag=16, frozen=True):
    """Head to worker: use the weights that follow as frames from the next rollout on. There is no reply.

    Without weights and without a copy, it answers `Missing`: there are none, keep the current ones.
    """

    version: int
    copy: Copy | None = None  # as with Adopt


class Apply(_Message, tag=17, frozen=True):
    """Head to worker: run a function on some of the environments."""

    call: int
    rows: list[int]  # of the worker's own shard, counted from its start
    function: bytes  # cloudpickle


class Show(_Message, tag=19, frozen=True):
    """Head to worker: show the last results again, in the other step buffer. Answered by Stepped."""

    call: int
    buffer: int


class Episode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One episode of an evaluation."""

    index: int  # in the evaluation's table
    seed: int  # for the environment's reset
    options: bytes | None  # cloudpickle: for the environment's reset


class Evaluate(_Message, tag=32, frozen=True):
    """Head to worker: play these episodes as well, and soon report which are over. Answered by Evaluated."""

    call: int
    code: bytes | None  # cloudpickle of a `wire.assignment.EvaluationPlan`; None: continue with the current one
    num_envs: int  # how many environments to use
    episodes: list[Episode]
    limit_s: float  # answer after this many seconds at the latest, but at least one step


class Registered(_Message, tag=18, frozen=True):
    """Head to worker: your key is now accepted; reconnect with it, and join."""


class Join(msgspec.Struct, tag=20, frozen=True, array_like=True):
    """Worker to head: here I am.

    Like Register, it must be readable by a head of another version, so that the head can refuse the worker: their
    fields are never changed, only added to, and unknown fields are ignored.
    """

    protocol: int
    worker_index: int
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    hostname: Name
    versions: Annotated[dict[Name, Name], Meta(max_length=100)] = {}
    machine: Name = ""  # equal for workers that may be able to read each other's memory
    board: BoardAddress | None = None


class Made(_Message, tag=29, frozen=True):
    """Worker to head: the shard's environments are made; this describes them."""

    call: int
    description: bytes  # values: a dict, see `worker.making.describe_envs`
    packages: Packages = {}  # packages imported to make them


class Ready(_Message, tag=21, frozen=True):
    """Worker to head: the shard can be reset and stepped."""

    call: int
    shares_memory: bool
    has_neighbour: bool = False  # whether the neighbour's board could be read


class Progress(_Message, tag=30, frozen=True):
    """Worker to head: this call is making progress: a step or reset is finished. Not yet an answer."""

    call: int


class Missing(_Message, tag=34, frozen=True):
    """Worker to head: the weights are not on the other worker's board. Not an answer to a call."""

    version: Annotated[int, Meta(ge=0, lt=2**53)]
    held: Annotated[int, Meta(ge=0, lt=2**53)]  # the version it holds instead


class Stepped(_Message, tag=22, frozen=True):
    """Worker to head: the shard was stepped or reset; its arrays are in place or follow as frames."""

    call: int
    infos: bytes | None  # values; None: empty
    columns: bytes | None  # values: leaves without a fixed size, one list per leaf; None: there are none
    generation: Annotated[int, Meta(ge=0, lt=MAX_GENERATION)] = 0  # of the infos in shared memory; 0: there are none
    errors: list[tuple[int, str]] = []  # forgiven exceptions of environments: rows of the shard, and texts
    probes: bytes | None = None  # values: see `policy.probes.Probes`

    @property
    def is_plain(self) -> bool:
        """Whether the reply consists of two numbers only: the call and the generation of the infos."""
        return self.infos is None and self.columns is None and self.probes is None and not self.errors


class Returned(_Message, tag=23, frozen=True):
    """Worker to head: what the call returned, one value per environment."""

    call: int
    values: bytes


class Failed(_Message, tag=24, frozen=True):
    """Worker to head: an environment, the policy, or other user code raised."""

    call: int
    env_index: int | None
    type_module: str
    type_name: str
    text: str
    traceback: str
    where: Where = "environment"  # whose code raised
    base: str = ""  # the name of the nearest built-in base of the exception's type


class Adopted(_Message, tag=25, frozen=True):
    """Worker to head: the policy works here, and this is what it returns besides actions."""

    call: int
    extras: list[ArraySpec]
    states: list[ArraySpec]
    packages: Packages = {}  # packages imported since `Made`


class Collected(_Message, tag=27, frozen=True):
    """Worker to head: the rollout is made; its arrays are in place or follow as frames."""

    call: int
    summary: bytes  # values: finished episodes and final observations
    busy_s: float
    first: int  # the first step that was not sent in a Part
    version: Annotated[int, Meta(ge=0, lt=2**53)]  # of the weights it was made with
    probes: bytes | None = None  # values: see `policy.probes.Probes`


class Evaluated(_Message, tag=33, frozen=True):
    """Worker to head: the episodes that have finished since the last answer, and those that were not begun."""

    call: int
    finished: bytes  # values: a list, see `worker.episode_player`
    unstarted: list[int]  # episodes that go back to the head


class Part(_Message, tag=28, frozen=True):
    """Worker to head: the next steps of the current rollout, as frames, while the rest is being made."""

    call: int
    first: int
    count: int


class Register(msgspec.Struct, tag=31, frozen=True, array_like=True):
    """Worker to head: I want to join, and this is my own key. The only message that the ticket's key allows."""

    protocol: int
    worker_index: int
    public_key: Key


Request: TypeAlias = (
    Assign
    | Serve
    | Reset
    | Step
    | Invoke
    | SetAttribute
    | Apply
    | Stop
    | Refused
    | Adopt
    | Collect
    | Decide
    | Record
    | Ping
    | Resume
    | Show
    | Cancel
    | Load
    | Evaluate
    | Registered
)
Reply: TypeAlias = (
    Register
    | Join
    | Made
    | Ready
    | Missing
    | Stepped
    | Returned
    | Failed
    | Adopted
    | Collected
    | Evaluated
    | Part
    | Progress
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

encode = _encoder.encode


def decode_request(frame: bytes | memoryview) -> Request:
    """Decode and check a message from the head.

    Raises:
        WireError: The message is not a request.
    """
    try:
        return _request_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"This is not a request: {error}") from error


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Decode and check a message from a worker.

    Raises:
        WireError: The message is not a reply.
    """
    try:
        return _reply_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"This is not a reply: {error}") from error
