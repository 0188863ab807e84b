"""One batch of /v1/completions under way, with or without a client."""

import asyncio
import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.dialects.replays.record import BatchRecord
from gateway.dialects.replies.written import Written

_ABORT = "abort"
_BEHIND_THE_LOOP = 1 << 20  # bytes, whose digest takes a millisecond


class End(StrEnum):
    """The end of a batch without a client."""

    ADOPTED = "adopted"  # an equal request has it
    EXPIRED = "expired"  # no equal request came in time
    CROWDED = "crowded"  # newer ones needed its room
    STALE = "stale"  # the equal request demands newer weights
    FAILED = "failed"
    ABORTED = "aborted"
    STOPPED = "stopped"  # the gateway ended


async def identity_of(route: str, client: str, content: bytes) -> bytes:
    """Return what equal requests of one client have in common; `client` is the name of its key."""
    digest = hashlib.blake2b(f"{route}\0{client}\0".encode(), digest_size=16)
    if len(content) > _BEHIND_THE_LOOP:
        await asyncio.to_thread(digest.update, content)
    else:
        digest.update(content)
    return digest.digest()


@dataclass(eq=False, slots=True)
class Batch:
    """A run of a request's prompts. `oldest` is a weight version that none of its tokens is older than, and none of
    those that a gateway before this one has noted is newer than `newest`."""

    identity: bytes
    request_id: str
    oldest: int
    task: asyncio.Task[Written]
    record: BatchRecord
    newest: int = 0
    has_left: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done while it has no client."""
    expiry: asyncio.TimerHandle | None = None

    @property
    def is_orphan(self) -> bool:
        return self.has_left.done()

    @property
    def num_bytes(self) -> int:
        """Size of the reply, once there is one."""
        return self._reply.num_bytes if self._reply else 0

    @property
    def is_aborted(self) -> bool:
        """True where a client ended a sample by its id, or all of them."""
        return self._reply is not None and any(end.get("finish_reason") == _ABORT for end in self._reply.ends)

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def _reply(self) -> Written | None:
        return self.task.result() if self.task.done() and not self.has_failed else None
