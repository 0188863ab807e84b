"""The record of a submission, or of a batch that may be replayed: what happened, in order. A later gateway takes the
same steps."""

import msgspec

OF_GROUP = -1
"""In place of a sample's number: the event is of a whole group. Of `OF_SUBMISSION` groups it is of all."""
OF_SUBMISSION = -1


class Head(msgspec.Struct, tag="head", frozen=True):
    """A submission as it began, in seconds since the epoch. `acked` is its cursor. `groups` is JSON; "" where all is
    delivered."""

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
    """One event; `content` is None once it was acked. `mark` is the end of its sample or group."""

    cursor: int
    group: int
    sample: int
    mark: str
    content: bytes | None

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return len(self.content or b"") + _OBJECT_BYTES


class Prompt(msgspec.Struct, tag="prompt", array_like=True, frozen=True):
    """A group's prompt as an engine read it, in int32."""

    group: int
    token_ids: bytes


class Growth(msgspec.Struct, tag="growth", array_like=True, frozen=True):
    """What a sample has got since the last one: `choice` is JSON, as in a chunk of a stream, with all its versions."""

    group: int
    sample: int
    choice: bytes


class Restart(msgspec.Struct, tag="restart", array_like=True, frozen=True):
    """An open sample begins again."""

    group: int
    sample: int


class Ack(msgspec.Struct, tag="ack", array_like=True, frozen=True):
    """The client has the events up to `cursor`."""

    cursor: int


Step = Event | Prompt | Growth | Restart | Ack

_OBJECT_BYTES = 300  # of an event, beside its content

read_head = msgspec.msgpack.Decoder(Head).decode
read_step = msgspec.msgpack.Decoder(Step).decode
