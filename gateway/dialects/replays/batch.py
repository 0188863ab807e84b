"""One batch of /v1/completions under way, with or without a client.

Its record has its request, and what engines make of it: chunks as they came, and cuts. A later gateway goes on from
that.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from enum import StrEnum

import msgspec

from engines.engine import Json
from gateway.dialects.raw_json import encoded
from gateway.dialects.written import Written
from gateway.fleet.replica import Flight, Replica
from gateway.ledger.ledger import Ledger, Record

KIND = "batch"
_ABORT = "abort"
_BEHIND_THE_LOOP = 1 << 20  # bytes, whose digest takes a millisecond
_AT_ONCE = 1 << 24  # bytes, which are encoded in a few milliseconds
_WORTH_IT_S = 1.0
"""Age from which a batch is written: a younger one has little to lose, and writing it would delay its reply."""
_WORTH_IT_BYTES = 1 << 24
"""Size from which a younger batch is written too: it waits in memory until then."""

Path = tuple[int, ...]
"""A prompt's index; behind it the sample that continues."""


class Request(msgspec.Struct, tag="request", frozen=True):
    """A batch's request with its body as it came. `oldest` is the batch's oldest weight version."""

    identity: bytes
    request_id: str
    session: str
    oldest: int
    body: bytes


class Came(msgspec.Struct, tag="came", array_like=True, eq=False):
    """Chunks of an attempt, in the order of their arrival; a new attempt makes those before it void.

    `versions` and `kv_versions` are those of its flight so far. `is_whole` where the chunk is a whole reply.
    """

    path: Path
    attempt: bytes
    replica_id: str
    versions: list[int]
    kv_versions: list[int]
    is_whole: bool
    chunks: list[bytes]


class Cut(msgspec.Struct, tag="cut", array_like=True, eq=False):
    """The reply, as JSON, whose open samples continue one by one from here on; behind a sample's path that sample."""

    path: Path
    answer: bytes


Note = Came | Cut


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
    """A run of a request's prompts. What is made of them is noted, and written once that is worth it; without a ledger
    nothing is."""

    task: "asyncio.Task[Written]"

    def __init__(self, request: Request, ledger: Ledger, record: Record | None = None) -> None:
        """`record` is that of a batch of a gateway before this one."""
        self.identity, self.request_id = request.identity, request.request_id
        self.oldest = request.oldest
        """A weight version that none of its tokens is older than."""
        self.newest = 0
        """None of the tokens that a gateway before this one has noted is newer."""
        self.has_left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done while it has no client."""
        self.expiry: asyncio.TimerHandle | None = None
        self.is_on = ledger.is_on
        """False where nothing is noted any more."""
        self._request = request if self.is_on and record is None else None
        self._ledger = ledger
        self._record = record or Record.new(ledger, KIND)
        self._began = time.monotonic()
        self._pending: dict[_Attempt | Cut, None] = {}
        self._pending_bytes = 0

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

    # Record

    def making(self, index: int) -> "Making | None":
        """Return what notes a prompt; None where nothing is noted."""
        return Making(self, (index,)) if self.is_on else None

    @property
    def is_written(self) -> bool:
        return self._record.is_kept

    @property
    def written_bytes(self) -> int:
        return self._record.num_bytes

    @property
    def has_news(self) -> bool:
        """True where the ledger lacks something that was noted."""
        return bool(self._pending) or self._record.num_writing > 0

    @property
    def is_due(self) -> bool:
        """True where there may be something to write, and the write before has ended."""
        if not self.is_on or self._record.num_writing:
            return False
        if self.is_written:
            return bool(self._pending)
        return time.monotonic() - self._began >= _WORTH_IT_S or self._pending_bytes > _WORTH_IT_BYTES

    def write(self) -> bool:
        """Write some of what is new. Return False where nothing is."""
        if self._request is not None:
            self._record.begin([self._request])
            self._request = None
        if notes := self._news():
            self._record.add(*notes)
        return bool(notes)

    def _news(self) -> list[Note]:
        """Return notes that may be kept, about `_AT_ONCE` bytes: none of tokens whose version an update leaves open."""
        news: list[Note] = []
        size = 0
        for one in list(self._pending):
            if size >= _AT_ONCE:
                break
            if isinstance(one, Cut):
                del self._pending[one]
                news.append(one)
                size += len(one.answer)
            elif one.is_vouched:
                self.drop(one)
                size += one.num_bytes
                news.append(one.taken())
        return news

    def stop(self) -> None:
        """Note nothing any more."""
        self.is_on, self._request = False, None
        self._pending.clear()
        self._pending_bytes = 0

    def forget(self) -> None:
        """Drop the record."""
        self.stop()
        self._record.remove()

    async def forgotten(self) -> None:
        """Drop the record; return once no later gateway can find it."""
        if self.is_written:
            self.forget()
            await self._ledger.written()

    def add(self, note: "_Attempt | Cut", size: int = 0) -> None:
        """Take a note, or `size` bytes more of it."""
        if self.is_on:
            self._pending[note] = None
            self._pending_bytes += size

    def drop(self, attempt: "_Attempt") -> None:
        """Drop what an attempt has that is not written."""
        if attempt in self._pending:
            del self._pending[attempt]
            self._pending_bytes -= attempt.num_bytes


class Making:
    """What is made of one prompt, or of the rest of one sample."""

    def __init__(self, batch: Batch, path: Path) -> None:
        self._batch = batch
        self._path = path
        self._attempt: _Attempt | None = None

    def begin(self, replica: Replica, flight: Flight, *, is_whole: bool) -> Callable[[list[bytes]], None]:
        """Begin an attempt; return what takes its chunks."""
        self._end_attempt()
        self._attempt = attempt = _Attempt(self._batch, self._path, replica, flight, is_whole=is_whole)
        self._batch.add(attempt)  # also without chunks: those of the attempt before are void
        return attempt.add

    def cut(self, answer: Json) -> None:
        """Note a reply whose open samples continue."""
        self._end_attempt()
        if self._batch.is_on:
            self._batch.add(Cut(self._path, encoded(answer)))

    def rest(self, sample: int) -> "Making":
        return Making(self._batch, (*self._path, sample))

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._batch.drop(self._attempt)


class _Attempt:
    def __init__(self, batch: Batch, path: Path, replica: Replica, flight: Flight, *, is_whole: bool) -> None:
        self.path = path
        self._batch = batch
        self._replica, self._flight, self._is_whole = replica, flight, is_whole
        self._id = secrets.token_bytes(4)
        self._chunks: list[bytes] = []
        self.num_bytes = 0
        """Size of the chunks that were not taken."""

    @property
    def is_vouched(self) -> bool:
        return self._replica.weight_version is not None

    def add(self, chunks: list[bytes]) -> None:
        if self._batch.is_on:
            self._chunks += chunks
            size = sum(map(len, chunks))
            self.num_bytes += size
            self._batch.add(self, size)

    def taken(self) -> Came:
        chunks, self._chunks, self.num_bytes = self._chunks, [], 0
        return Came(
            self.path,
            self._id,
            self._replica.replica_id,
            list(self._flight.versions),
            self._flight.kv_versions({}),
            self._is_whole,
            chunks,
        )
