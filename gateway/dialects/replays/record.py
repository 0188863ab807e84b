"""The record of one batch in the ledger: its request, and what was made of it so far."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.replays.making import Notes
from gateway.ledger.batches import BatchRow
from gateway.ledger.file import LedgerFile
from gateway.ledger.shared import SharedLedger

_WORTH_IT_S = 1.0
"""Age from which a batch is written: a younger one has little to lose, and writing it would delay its reply."""
_WORTH_IT_BYTES = 1 << 24
"""Size from which a younger batch is written too: it waits in memory until then."""


class Request(msgspec.Struct):
    """A batch's request without its body. `oldest` is the batch's oldest weight version."""

    identity: bytes
    request_id: str
    session: str
    oldest: int


class Record:
    """Notes of a batch, and their way into the ledger. Nothing is written where the ledger is off."""

    def __init__(
        self, number: int, request: Request, body: bytes, ledger: SharedLedger, *, is_written: bool = False
    ) -> None:
        """`is_written` is True for a batch of a gateway before this one, which the ledger has."""
        self.number = number
        self._request = request
        self._body = body
        self._ledger = ledger
        self._notes = Notes()
        self._began = time.monotonic()
        self.is_written = is_written
        self.num_bytes = 0
        """Size of what was written."""
        self._num_writing = 0
        if not ledger.is_on:
            self.stop()

    def noting(self, prompts: Sequence[CompletionPrompt]) -> list[CompletionPrompt]:
        """Return the prompts with their notes."""
        if not self.is_on:
            return list(prompts)
        return [replace(prompt, making=self._notes.of(prompt.index)) for prompt in prompts]

    @property
    def is_on(self) -> bool:
        """False where nothing is noted any more."""
        return self._notes.is_on

    @property
    def has_news(self) -> bool:
        """True where the ledger lacks something that was noted."""
        return self._notes.has_news or self._num_writing > 0

    @property
    def is_due(self) -> bool:
        """True where there may be something to write, and the write before has ended."""
        if not self.is_on or self._num_writing:
            return False
        if self.is_written:
            return self._notes.has_news
        return time.monotonic() - self._began >= _WORTH_IT_S or self._notes.num_bytes > _WORTH_IT_BYTES

    def write(self) -> int:
        """Write some of what is new; return its size."""
        before = self.num_bytes
        if not self.is_written:
            self.is_written = True
            row = BatchRow(self.number, msgspec.msgpack.encode(self._request), self._body)
            self._body = b""
            self._put(row.body, lambda file: file.add_batch(row))
        if notes := self._notes.take():
            content = msgspec.msgpack.encode(notes)
            self._put(content, lambda file: file.grow_batch(self.number, content))
        return self.num_bytes - before

    def stop(self) -> None:
        """Note nothing any more."""
        self._notes.stop()
        self._body = b""

    def move(self, number: int) -> None:
        """Have this number in another ledger, which lacks what the one before had of the batch."""
        if self.is_written:
            self.stop()
            self.is_written = False
        self.number = number

    def forget(self) -> None:
        """Drop the record."""
        self.stop()
        self.num_bytes = 0
        if self.is_written:
            self.is_written = False
            self._ledger.put(lambda file: file.forget_batch(self.number), _nothing)

    async def forgotten(self) -> None:
        """Drop the record; return once no later gateway can find it."""
        if not self.is_written:
            return
        self.forget()
        done = asyncio.Event()
        self._ledger.put(_nothing_written, done.set)
        await done.wait()

    def _put(self, content: bytes, work: Callable[[LedgerFile], None]) -> None:
        self.num_bytes += len(content)
        self._num_writing += 1
        self._ledger.put(work, self._wrote)

    def _wrote(self) -> None:
        self._num_writing -= 1


def _nothing() -> None:
    pass


def _nothing_written(file: LedgerFile) -> None:
    pass
