"""Messages between a gateway and the reader beside an engine: msgpack, each with its length before.

Lists of tokens and log-probs pass as bytes, which nobody looks into on the way.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from msgspec import Raw, Struct

from engines import errors
from engines.chunks import Choice, Chunk
from engines.engine import Json
from engines.errors import EngineError, EngineFailed, EngineRefused, InvalidRequest, RolloutGatewayError
from engines.raw_json import NULL

log = structlog.get_logger()

S = TypeVar("S")
R = TypeVar("R")

_LENGTH_BYTES = 4
_LONGEST_BYTES = 1 << 30
# What the other process has not read: it stands still.
_MOST_UNREAD_BYTES = 1 << 30
_LISTS = ("token_ids", "prompt_token_ids", "logprobs")


class Hello(Struct, tag=0, array_like=True, gc=False):
    """The first message of a gateway."""

    key: str


class Ask(Struct, tag=1, array_like=True, gc=False):
    """A request for the engine, in JSON. With `joins` its chunks are few."""

    number: int
    path: str
    body: bytes
    timeout_s: float
    is_whole: bool
    joins: bool
    trace: dict[str, str]


class Cancel(Struct, tag=2, array_like=True, gc=False):
    """Nobody waits for the reply any more."""

    number: int


class ToldChoice(Struct, array_like=True, gc=False):
    """A `Choice`. `fields` are all others than its lists, which are empty there where the engine told them."""

    index: int
    finish_reason: str | None
    text: str | None
    token_ids: bytes
    prompt_token_ids: bytes
    logprobs: dict[str, bytes] | None
    weight_versions: list[Json] | None
    delta: Json | None
    fields: dict[str, bytes]

    @classmethod
    def of(cls, choice: Choice) -> "ToldChoice":
        fields = {key: b"" if key in _LISTS else bytes(value) for key, value in choice.told.items()}
        scores = choice.logprobs
        return cls(
            choice.index, choice.finish_reason, choice.text, bytes(choice.token_ids), bytes(choice.prompt_token_ids),
            None if scores is None else {key: bytes(value) for key, value in scores.items()},
            choice.weight_versions, choice.delta, fields,
        )  # fmt: skip

    def choice(self) -> Choice:
        told: Json = {key: Raw(value) for key, value in self.fields.items()}
        scores = None if self.logprobs is None else {key: Raw(value) for key, value in self.logprobs.items()}
        lists = (Raw(self.token_ids), Raw(self.prompt_token_ids), NULL if scores is None else scores)
        told |= {key: value for key, value in zip(_LISTS, lists, strict=True) if key in told}
        return Choice(
            self.index, self.finish_reason, self.text, lists[0], lists[1], scores,
            self.weight_versions, self.delta, told,
        )  # fmt: skip


class ToldChunk(Struct, array_like=True, gc=False):
    """A `Chunk`; the first of a reply has its head."""

    choices: list[ToldChoice]
    usage: Json | None
    prompt_token_ids: list[int] | None
    head: Json

    @classmethod
    def of(cls, chunk: Chunk, *, has_head: bool) -> "ToldChunk":
        head = chunk.head if has_head else {}
        return cls(list(map(ToldChoice.of, chunk.choices)), chunk.usage, chunk.prompt_token_ids, head)

    def chunk(self) -> Chunk:
        return Chunk([told.choice() for told in self.choices], self.usage, self.prompt_token_ids, self.head)


class Told(Struct, tag=3, array_like=True, gc=False):
    """Chunks of a reply."""

    number: int
    chunks: list[ToldChunk]


class Ended(Struct, tag=4, array_like=True, gc=False):
    """A reply is whole."""

    number: int


class Failed(Struct, tag=5, array_like=True, gc=False):
    """A reply has ended with an error: the name of its class, its message and its fields."""

    number: int
    kind: str
    text: str
    param: str | None = None
    replica_id: str = ""
    status: int | None = None
    body: Json = {}
    retry_after_s: float | None = None

    @classmethod
    def of(cls, number: int, error: RolloutGatewayError) -> "Failed":
        failed = cls(number, type(error).__name__, str(error))
        if isinstance(error, InvalidRequest):
            failed.param = error.param
        if isinstance(error, EngineError):
            failed.replica_id, failed.retry_after_s = error.replica_id, error.retry_after_s
        if isinstance(error, EngineRefused | EngineFailed):
            failed.status = error.status
        if isinstance(error, EngineRefused):
            failed.body = error.body
        return failed

    def error(self) -> RolloutGatewayError:
        kind = getattr(errors, self.kind)
        error: RolloutGatewayError = kind.__new__(kind, self.text)
        error.args = (self.text,)
        if isinstance(error, InvalidRequest):
            error.param = self.param
        if isinstance(error, EngineError):
            error.replica_id, error.retry_after_s = self.replica_id, self.retry_after_s
        if isinstance(error, EngineRefused):
            error.status, error.body = self.status or 400, self.body
        elif isinstance(error, EngineFailed) and self.status is not None:
            error.status = self.status
        return error


class Alive(Struct, tag=6, array_like=True, gc=False):
    """The reader runs, whatever its engine does."""


ToReader = Hello | Ask | Cancel
ToGateway = Told | Ended | Failed | Alive


class Wire(asyncio.Protocol, Generic[S, R]):
    """One end of a connection. All that is sent in one turn of the event loop leaves together.

    `received` is called for each message that comes, `ended` once, when the connection ends or the other end breaks the
    protocol.
    """

    def __init__(
        self, receives: Any, received: Callable[["Wire[S, R]", R], None], ended: Callable[["Wire[S, R]"], None]
    ) -> None:
        """`receives` is the union of the messages that come."""
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._received, self._ended = received, ended
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._came = bytearray()
        self._length: int | None = None

    def send(self, message: S) -> None:
        """Have a message leave at the end of this turn; none leaves a connection that has ended."""
        content = self._encode(message)
        if len(content) > _LONGEST_BYTES:
            raise ValueError(f"a {type(message).__name__} of {len(content)} bytes: at most {_LONGEST_BYTES}")
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += (len(content).to_bytes(_LENGTH_BYTES, "big"), content)

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(self._waiting)
            if self._transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
                self._break("the other end reads nothing")
        self._waiting = []

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def peer(self) -> Any:
        """The address of the other end."""
        return self._transport.get_extra_info("peername") if self._transport else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        while len(self._came) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._came[:_LENGTH_BYTES], "big")
            if end > _LONGEST_BYTES:
                self._break(f"a message of {end} bytes")
                return
            if len(self._came) < end:
                return
            content = bytes(memoryview(self._came)[_LENGTH_BYTES:end])
            del self._came[:end]
            try:
                message = self._decode(content)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                self._break(f"a message cannot be read: {error}")
                return
            self._received(self, message)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._ended(self)

    def _break(self, reason: str) -> None:
        log.error("a connection between a gateway and a reader is closed", reason=reason, peer=self.peer)
        self.close()
