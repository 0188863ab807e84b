"""One batch of /v1/completions under way, with or without a client.

Its record has its request, and what engines make of it. A later gateway goes on from that.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from enum import StrEnum
from functools import partial

from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.completions import Written
from gateway.dialects.sample import ABORT, Reply
from gateway.dialects.submissions.frames import BatchHead, Growth, Prompt, Restart, Step, read_step
from gateway.dialects.submissions.group_record import GroupRecord
from gateway.ledger.folder import Left
from gateway.ledger.ledger import Ledger, Record

KIND = "batch"
_BEHIND_THE_LOOP = 1 << 20  # bytes, whose digest takes a millisecond
_WORTH_IT_S = 1.0
"""Age from which a batch is written: a younger one has little to lose, and writing it would delay its reply."""


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


class Batch:
    """A run of a request's prompts. What is made of them is written once that is worth it; without a ledger nothing
    is."""

    task: "asyncio.Task[Written]"

    def __init__(
        self, head: BatchHead, prompts: Sequence[CompletionPrompt], ledger: Ledger, left: Left | None = None
    ) -> None:
        """`left` is the record of a batch of a gateway before this one. Raise `ValueError` or `KeyError` where it
        cannot be read."""
        self.identity, self.request_id = head.identity, head.request_id
        self.oldest = head.oldest
        """A weight version that none of its tokens is older than."""
        self.newest = 0
        """None of the tokens that a gateway before this one has made is newer."""
        self.has_left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done while it has no client."""
        self.expiry: asyncio.TimerHandle | None = None
        self._ledger = ledger
        self._record = Record(ledger, left.name, left.num_bytes) if left else Record.new(ledger, KIND)
        self._head = None if left else head
        self._began = time.monotonic()
        self._grown: dict[int, None] = {}  # prompts
        self._made: dict[int, GroupRecord] = {}
        """What there is of each prompt, until all of it is written; empty where nothing is."""
        if ledger.is_on:
            self._made = {one.index: GroupRecord(one.index, one.rollout.n, one.read) for one in prompts}
        if left is not None:
            self._restore(left)
        self.prompts = prompts
        for prompt in prompts if self._made else ():
            made = self._made[prompt.index]
            made.begin(prompt)
            made.reply.heard = partial(self._grown.setdefault, prompt.index)

    def _restore(self, left: Left) -> None:
        for frame in left.frames[1:]:
            step = read_step(frame)
            assert isinstance(step, Prompt | Growth | Restart)
            self._made[step.group].restore(step)
        samples = [sample for made in self._made.values() for sample in made.reply.samples]
        spans = [span for sample in samples for span in sample.spans or ()]
        self.newest = max((int(span.get("base_version") or span["version"]) for span in spans), default=0)

    @property
    def replies(self) -> dict[int, Reply]:
        """What there is of each prompt."""
        return {index: made.reply for index, made in self._made.items()}

    @property
    def is_orphan(self) -> bool:
        return self.has_left.done()

    @property
    def num_bytes(self) -> int:
        """Size of the reply, once there is one."""
        return sum(map(len, self._reply.choices)) if self._reply else 0

    @property
    def is_aborted(self) -> bool:
        """True where a client ended a sample by its id, or all of them."""
        return self._reply is not None and any(reason == ABORT for reason, _ in self._reply.ends)

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def _reply(self) -> Written | None:
        return self.task.result() if self.task.done() and not self.has_failed else None

    # Record

    @property
    def is_written(self) -> bool:
        return self._record.is_kept

    @property
    def written_bytes(self) -> int:
        return self._record.num_bytes

    @property
    def has_news(self) -> bool:
        """True where the ledger lacks something that was made."""
        return not self._grown.keys().isdisjoint(self._made) or self._record.num_writing > 0

    @property
    def is_due(self) -> bool:
        """True where there may be something to write, and the write before has ended."""
        is_old = self.is_written or time.monotonic() - self._began >= _WORTH_IT_S
        return bool(self._made) and is_old and not self._record.num_writing

    def write(self) -> None:
        """Write what is new."""
        if self._head is not None:
            self._record.begin([self._head])
            self._head = None
        grown, steps = list(self._grown), list[Step]()
        self._grown.clear()
        for made in filter(None, map(self._made.get, grown)):
            steps += made.growth()
            if made.is_recorded:
                del self._made[made.group]  # it would take memory beside its part of the reply
        if steps:
            self._record.add(*steps)

    def stop(self) -> None:
        """Write nothing any more."""
        self._made, self._head = {}, None
        self._grown.clear()

    def forget(self) -> None:
        """Drop the record."""
        self.stop()
        self._record.remove()

    async def forgotten(self) -> None:
        """Drop the record; return once no later gateway can find it."""
        if self.is_written:
            self.forget()
            await self._ledger.written()
