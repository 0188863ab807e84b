"""Joins the chunks of an engine's stream into the reply that it would have sent as a whole.

Replies are read in chunks so that the tokens are here if the engine dies. Engines that we start send coarse chunks,
which cost them nothing; the samples of one prompt even gain by it (vLLM 0.26 made 9 % more tokens). A short single
sample is read whole: it has few tokens to lose. Chunks are kept as bytes, and many are parsed together.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from engines.clients.http import broken_off
from engines.engine import Json
from engines.errors import EngineFailed, EngineRefused
from engines.types import ReplicaInfo
from gateway.dialects.replies.carried import NO_JSON, NULL, head_of, opened
from gateway.dialects.replies.sample import Choice, Sample
from gateway.fleet.placement.routing import Rollout

# Fields with which vLLM refuses to stream, or streams in another shape.
_WHOLE_ONLY = ("prompt_logprobs", "echo", "use_beam_search")
_SHORT_TOKENS = 64  # two coarse chunks
_LARGE_BYTES = 1 << 19
_PARSED_BYTES = 1 << 16  # chunks of so many bytes are parsed in a fraction of a millisecond
_HEAD_BYTES = 1 << 6  # an error stands at the begin of its chunk
_DONE = b"[DONE]"


def is_read_in_chunks(body: Json, limit: int, rollout: Rollout, info: ReplicaInfo) -> bool:
    """True if this engine's reply to `body`, of at most `limit` tokens a sample, is read in chunks.

    A rest is, however short: where engines die in a row, each is to add tokens.
    """
    is_worth_it = rollout.n > 1 or limit > _SHORT_TOKENS or rollout.goes_on
    return (
        is_worth_it and info.streams and all(body.get(field) is None or body[field] is False for field in _WHOLE_ONLY)
    )


class _Chunk(Struct, gc=False):
    choices: list[Choice]
    usage: Raw = NULL


class _Usage(Struct, gc=False):
    completion_tokens: int | None = None


_usage = msgspec.json.Decoder(_Usage).decode
_chunk = msgspec.json.Decoder(_Chunk).decode
_decoded = msgspec.json.Decoder().decode


class Assembly:
    """The chunks of one prompt with `n` samples. `has_text` is False for replies of token ids alone."""

    def __init__(self, n: int, replica_id: str, *, has_text: bool = True) -> None:
        self._replica_id = replica_id
        self._head: Json | None = None
        self._usage = NULL
        self._counted: int | None = None
        self._samples = [Sample(index, has_text=has_text) for index in range(n)]
        self._num_bytes = 0
        self._pieces: list[bytes] = []
        self._num_unparsed = 0
        self._failure: EngineFailed | EngineRefused | None = None

    def add(self, piece: bytes) -> None:
        """Add bytes of the stream. Raises as `reply` does at a chunk that cannot be read or that reports an error, at
        once or when more have come."""
        self._pieces.append(piece)
        self._num_unparsed += len(piece)
        if self._num_unparsed > _PARSED_BYTES or piece.find(b'"error"', 0, _HEAD_BYTES) >= 0:
            self._parse()

    async def joined(self, large: asyncio.Lock) -> Json:
        """As `reply`. Large replies are joined one after the other, and each sample in a turn of the event loop."""
        if self._num_bytes + self._num_unparsed > _LARGE_BYTES:
            async with large:
                self._check_ends()
                for sample in self._samples:
                    await asyncio.sleep(0)
                    self._join(sample)
        return self.reply()

    def reply(self) -> Json:
        """The whole reply. Raises `EngineFailed` if a chunk cannot be read, if a sample began and did not end, or has
        tokens that do not count; and the error that a chunk reports."""
        self._check_ends()
        reply = self._joined()
        if (surplus := self._surplus) > 0:
            raise EngineFailed(
                f"its chunks have {surplus} tokens more than its usage counts", replica_id=self._replica_id
            )
        return reply

    def part(self) -> Json | None:
        """The reply as far as it came, decoded, `finish_reason` None where a sample has not ended; None without any
        token, and where its chunks cannot be joined."""
        if not self.num_made:
            return None
        for sample in self._samples:
            sample.opened()
        try:
            part: Json = opened(self._joined())
        except EngineFailed:  # the reply has failed for the same reason, or for another
            return None
        return None if self._surplus > 0 else part

    @property
    def num_made(self) -> int:
        """Tokens of all samples so far, up to a chunk that cannot be read."""
        self._parse_up_to_failure()
        return sum(sample.num_tokens for sample in self._samples)

    @property
    def _surplus(self) -> int:
        """Tokens beyond those that the engine counts."""
        return 0 if self._counted is None else self.num_made - self._counted

    def _parse(self) -> None:
        """Parse the chunks that are complete. Raise the error of the first that cannot be read, now and later."""
        self._parse_up_to_failure()
        if self._failure is not None:
            raise self._failure

    def _parse_up_to_failure(self) -> None:
        if not self._pieces:
            return
        *lines, rest = b"".join(self._pieces).split(b"\n")
        self._pieces, self._num_unparsed = [rest] if rest else [], len(rest)
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if self._failure is None:
            self._failure = self._failure_in(events)

    def _failure_in(self, events: Sequence[bytes]) -> EngineFailed | EngineRefused | None:
        """Take the chunks before the first that cannot be read; return the error of that."""
        came: list[list[tuple[Choice, bytes]]] = [[] for _ in self._samples]
        failure: EngineFailed | EngineRefused | None = None
        for event in events:
            if event == _DONE:
                break
            try:
                self._see(event, came)
            except NO_JSON as error:
                failure = self._failure_of(event, error)
                break
        for sample, choices in zip(self._samples, came, strict=True):
            try:
                sample.add(choices)
            except ValueError as error:
                failure = failure or EngineFailed(f"its chunks cannot be read: {error}", replica_id=self._replica_id)
        return failure

    def _see(self, event: bytes, came: list[list[tuple[Choice, bytes]]]) -> None:
        """Sort the choices of a chunk by sample."""
        chunk = _chunk(event)
        self._num_bytes += len(event)
        if self._head is None:
            self._head = head_of(event)
        if chunk.usage is not NULL and chunk.usage != NULL:
            self._usage, self._counted = chunk.usage, _usage(chunk.usage).completion_tokens
        for choice in chunk.choices:
            if choice.index >= len(came):
                raise ValueError(f"a choice has index {choice.index}")
            came[choice.index].append((choice, event))

    def _failure_of(self, event: bytes, error: Exception) -> EngineFailed | EngineRefused:
        try:
            content = _decoded(event)
        except NO_JSON:
            content = None
        if isinstance(content, dict) and "error" in content:
            return broken_off("the stream", content, self._replica_id)
        return EngineFailed(
            f"its chunk is {event!r:.200}, not choices of {len(self._samples)} samples: {error}",
            replica_id=self._replica_id,
        )

    def _check_ends(self) -> None:
        self._parse()
        for sample in self._samples:
            if not sample.has_ended:
                raise EngineFailed(
                    f"the stream ended before sample {sample.index} did, after {sample.num_tokens} tokens",
                    replica_id=self._replica_id,
                )

    def _joined(self) -> Json:
        head = (self._head or {}) | ({} if self._usage == NULL else {"usage": opened(self._usage)})
        return head | {"choices": [self._join(sample) for sample in self._samples]}

    def _join(self, sample: Sample) -> Json:
        try:
            return sample.choice
        except NO_JSON as error:
            raise EngineFailed(f"its chunks cannot be joined: {error}", replica_id=self._replica_id) from error
