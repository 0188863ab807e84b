"""Notes of what engines make of a batch, from which a later gateway goes on: chunks as they came, and cuts."""

import secrets
from collections.abc import Callable

import msgspec

from engines.engine import Json
from gateway.dialects.raw_json import encoded
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica

_AT_ONCE = 1 << 24  # bytes, which are encoded in a few milliseconds

Path = tuple[int, ...]
"""A prompt's index; behind it the sample that continues."""


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


class Notes:
    """What was made of a batch since the last call of `take`."""

    def __init__(self) -> None:
        self.is_on = True
        self.num_bytes = 0
        """Size of the chunks that wait."""
        self._pending: dict[_Attempt | Cut, None] = {}

    def of(self, index: int) -> "Making":
        """Return the record of a prompt."""
        return Making(self, (index,))

    @property
    def has_news(self) -> bool:
        return bool(self._pending)

    def take(self) -> list[Note]:
        """Return notes that may be kept, about `_AT_ONCE` bytes: none of tokens whose version an update leaves open."""
        taken: list[Note] = []
        size = 0
        for one in list(self._pending):
            if size >= _AT_ONCE:
                break
            if isinstance(one, Cut):
                del self._pending[one]
                taken.append(one)
                size += len(one.answer)
            elif one.is_vouched:
                self.drop(one)
                size += one.num_bytes
                taken.append(one.taken())
        return taken

    def stop(self) -> None:
        """Take no further notes."""
        self.is_on = False
        self._pending.clear()
        self.num_bytes = 0

    def add(self, note: "_Attempt | Cut") -> None:
        if self.is_on:
            self._pending[note] = None

    def drop(self, attempt: "_Attempt") -> None:
        if attempt in self._pending:
            del self._pending[attempt]
            self.num_bytes -= attempt.num_bytes


class Making:
    """The record of one prompt, or of the rest of one sample."""

    def __init__(self, notes: Notes, path: Path) -> None:
        self._notes = notes
        self._path = path
        self._attempt: _Attempt | None = None

    def begin(self, replica: Replica, flight: Flight, *, is_whole: bool) -> Callable[[list[bytes]], None]:
        """Begin an attempt; return what takes its chunks."""
        self._end_attempt()
        self._attempt = attempt = _Attempt(self._notes, self._path, replica, flight, is_whole=is_whole)
        self._notes.add(attempt)  # also without chunks: those of the attempt before are void
        return attempt.add

    def cut(self, answer: Json) -> None:
        """Note a reply whose open samples continue."""
        self._end_attempt()
        if self._notes.is_on:
            self._notes.add(Cut(self._path, encoded(answer)))

    def rest(self, sample: int) -> "Making":
        return Making(self._notes, (*self._path, sample))

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._notes.drop(self._attempt)


class _Attempt:
    def __init__(self, notes: Notes, path: Path, replica: Replica, flight: Flight, *, is_whole: bool) -> None:
        self.path = path
        self._notes = notes
        self._replica, self._flight, self._is_whole = replica, flight, is_whole
        self._id = secrets.token_bytes(4)
        self._chunks: list[bytes] = []
        self.num_bytes = 0
        """Size of the chunks that were not taken."""

    @property
    def is_vouched(self) -> bool:
        return self._replica.weight_version is not None

    def add(self, chunks: list[bytes]) -> None:
        if self._notes.is_on:
            self._chunks += chunks
            size = sum(map(len, chunks))
            self.num_bytes += size
            self._notes.num_bytes += size
            self._notes.add(self)

    def taken(self) -> Came:
        chunks, self._chunks, self.num_bytes = self._chunks, [], 0
        flight = self._flight
        return Came(
            self.path,
            self._id,
            self._replica.replica_id,
            list(flight.versions),
            flight.kv_versions({}),
            self._is_whole,
            chunks,
        )
