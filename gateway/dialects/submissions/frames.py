"""The record of a submission, or of a batch that may be replayed: its head, then what happened, in order. A later
gateway takes the same steps."""

import msgspec

from engines.chunks import Choice
from engines.engine import Json

OF_GROUP = -1
"""In place of a sample's number: the event is of a whole group. Of `OF_SUBMISSION` groups it is of all."""
OF_SUBMISSION = -1


class Head(msgspec.Struct, tag="head", frozen=True):
    """A submission as it began, in seconds since the epoch. `groups` is JSON; "" where all is delivered, up to the
    cursor `acked`."""

    owner: str
    id: str
    digest: bytes
    began: float
    acked: int = 0
    groups: bytes = b""


class BatchHead(msgspec.Struct, tag="batch", frozen=True):
    """A batch of /v1/completions, with its body as it came. `identity` is the hash of the request, `oldest` the oldest
    weight version that its tokens may have."""

    identity: bytes
    request_id: str
    session: str
    oldest: int
    body: bytes


class Event(msgspec.Struct, tag="event", array_like=True, frozen=True):
    """One event. `mark` is the end of its sample or group."""

    cursor: int
    group: int
    sample: int
    mark: str
    content: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return len(self.content) + _OBJECT_BYTES


class Growth(msgspec.Struct, tag="growth", array_like=True, frozen=True, gc=False):
    """What a sample has got since the last one, as its reader told it; all that it has, where it begins (again).
    `inexact` is None unless it was resumed. `end` is JSON of the fields with which it has ended."""

    group: int
    sample: int
    begins: bool
    parts: list[Choice]
    spans: list[Json]
    kv_versions: list[int]
    inexact: list[str] | None
    end: bytes


class Ack(msgspec.Struct, tag="ack", array_like=True, frozen=True):
    """The client has the events up to `cursor`."""

    cursor: int


Step = Event | Growth | Ack

_OBJECT_BYTES = 300  # of an event, beside its content

read_head = msgspec.msgpack.Decoder(Head).decode
read_steps = msgspec.msgpack.Decoder(list[Step]).decode
