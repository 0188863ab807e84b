"""Joins the chunks of an engine's stream into the reply that it would have sent as a whole.

Replies are read in chunks so that the tokens are here if the engine dies. Engines that we start send coarse chunks,
which cost them nothing; the samples of one prompt even gain by it (vLLM 0.26 made 9 % more tokens). A short single
sample is read whole: it has few tokens to lose, and chunks cost this process three times the CPU.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from engines.engine import Json
from engines.errors import EngineFailed
from engines.types import ReplicaInfo
from gateway.dialects.replies.carried import (
    NO_JSON,
    NULL,
    check_text,
    choice_of,
    encoded,
    head_of,
    list_of,
    of_list,
    of_text,
    opened,
    text_of,
)
from gateway.dialects.spans import spans_so_far
from gateway.fleet.placement.routing import Rollout

# Fields with which vLLM refuses to stream, or streams in another shape.
_WHOLE_ONLY = ("prompt_logprobs", "echo", "use_beam_search")
_SHORT_TOKENS = 64  # two coarse chunks
_LARGE_BYTES = 1 << 19
_OFFSETS = "text_offset"


def is_read_in_chunks(body: Json, limit: int, rollout: Rollout, info: ReplicaInfo, *, parts: int = 1) -> bool:
    """True if this engine's reply to `body`, of at most `limit` tokens a sample, is read in chunks.

    A rest is, however short: where engines die in a row, each is to add tokens. So is one of the `parts` of a group,
    as the whole group would be.
    """
    is_worth_it = rollout.n * parts > 1 or limit > _SHORT_TOKENS or rollout.goes_on
    return (
        is_worth_it and info.streams and all(body.get(field) is None or body[field] is False for field in _WHOLE_ONLY)
    )


class _Choice(Struct, gc=False):
    """A choice of a chunk, its lists as the engine wrote them."""

    index: Annotated[int, Meta(ge=0)]
    finish_reason: str | None = None
    text: Raw = NULL
    token_ids: Raw = NULL
    prompt_token_ids: Raw = NULL
    weight_versions: Raw = NULL
    logprobs: dict[str, Raw] | None = None


class _Chunk(Struct, gc=False):
    choices: list[_Choice]
    usage: Raw = NULL


_chunk = msgspec.json.Decoder(_Chunk).decode
_names = msgspec.json.Decoder(list[str]).decode


class Assembly:
    """The chunks of one prompt with `n` samples. `has_text` is False for replies of token ids alone."""

    def __init__(self, n: int, replica_id: str, *, has_text: bool = True) -> None:
        self._replica_id = replica_id
        self._head: Json | None = None
        self._usage = NULL
        self._samples = [_Sample(index, has_text=has_text) for index in range(n)]
        self._num_bytes = 0

    def add(self, events: Sequence[bytes]) -> None:
        """Add chunks as an engine wrote them. Raises `EngineFailed` if they are no chunks of the samples."""
        for event in events:
            self._num_bytes += len(event)
            try:
                self._add(event, _chunk(event))
            except NO_JSON as error:
                raise EngineFailed(
                    f"its chunk is {event!r:.200}, not choices of {len(self._samples)} samples: {error}",
                    replica_id=self._replica_id,
                ) from error

    def _add(self, event: bytes, chunk: _Chunk) -> None:
        if self._head is None:
            self._head = head_of(event)
        if chunk.usage != NULL:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.index >= len(self._samples):
                raise ValueError(f"a choice has index {choice.index}")
            self._samples[choice.index].add(choice, event)

    async def joined(self, large: asyncio.Lock) -> Json:
        """As `reply`. Large replies are joined one after the other, and each sample in a turn of the event loop."""
        self._check_ends()
        if self._num_bytes > _LARGE_BYTES:
            async with large:
                for sample in self._samples:
                    await asyncio.sleep(0)
                    self._join(sample)
        return self.reply()

    def reply(self) -> Json:
        """The whole reply. Raises `EngineFailed` if a sample began and did not end."""
        self._check_ends()
        return self._joined()

    def _check_ends(self) -> None:
        for sample in self._samples:
            if not sample.has_ended:
                raise EngineFailed(
                    f"the stream ended before sample {sample.index} did, after {sample.num_tokens} tokens",
                    replica_id=self._replica_id,
                )

    def part(self) -> Json | None:
        """The reply as far as it came, decoded, `finish_reason` None where a sample has not ended; None without any
        token, and where its chunks cannot be joined."""
        if not any(sample.num_tokens for sample in self._samples):
            return None
        for sample in self._samples:
            sample.opened()
        try:
            part: Json = opened(self._joined())
        except EngineFailed:  # the reply has failed for the same reason, or for another
            return None
        return part

    def _joined(self) -> Json:
        head = (self._head or {}) | ({} if self._usage == NULL else {"usage": opened(self._usage)})
        return head | {"choices": [self._join(sample) for sample in self._samples]}

    def _join(self, sample: "_Sample") -> Json:
        try:
            return sample.choice
        except NO_JSON as error:
            raise EngineFailed(f"its chunks cannot be joined: {error}", replica_id=self._replica_id) from error

    @property
    def num_made(self) -> int:
        """Tokens of all samples so far."""
        return sum(sample.num_tokens for sample in self._samples)


class _Sample:
    """One sample: what its chunks have, without what is around it. vLLM sends none, or an opening alone, for a sample
    that was aborted before its first token."""

    def __init__(self, index: int, *, has_text: bool) -> None:
        self.index = index
        self.num_tokens = 0
        self._has_text = has_text
        # What came, without delimiters: few large buffers, since many small objects leave holes in memory.
        self._text, self._ids = bytearray(), bytearray()
        self._logprobs: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._prompt: Raw | None = None
        self._spans = NULL  # as the engine reported them last
        self._finish_reason: str | None = None
        self._last = b""
        self._has_begun = True

    @property
    def has_ended(self) -> bool:
        return not self.num_tokens or self._finish_reason is not None

    def add(self, choice: _Choice, event: bytes) -> None:
        """Take a chunk. Raise `ValueError` where a value is of another kind, so that the part before is kept."""
        token_ids, text = of_list(choice.token_ids), of_text(choice.text)
        prompt = choice.prompt_token_ids != NULL and of_list(choice.prompt_token_ids)
        scores = [
            (key, b"" if key == _OFFSETS else of_list(value))  # offsets are counted again
            for key, value in (choice.logprobs or {}).items()
        ]
        if token_ids:
            self._ids += b","
            self._ids += token_ids
            self.num_tokens += token_ids.count(b",") + 1
        self._text += text
        if prompt:
            self._prompt = choice.prompt_token_ids
        for key, value in scores:
            so_far = self._logprobs[key]
            if value:
                so_far += b","
                so_far += value
        if choice.weight_versions != NULL:
            self._spans = choice.weight_versions
        self._finish_reason = choice.finish_reason
        self._last = event

    def opened(self) -> None:
        """A sample without any chunk has not ended when the stream breaks."""
        self._has_begun = self.num_tokens > 0

    @cached_property
    def choice(self) -> Json:
        """The sample joined; its buffers become the values."""
        last = choice_of(self._last, self.index) if self._last else {}
        if not self._has_begun:
            last = {"finish_reason": None}
        elif last.get("finish_reason") is None and not self.num_tokens:
            last["finish_reason"] = "abort"
        if last.get("finish_reason") is None and self._spans != NULL:
            last["weight_versions"] = spans_so_far(opened(self._spans), self.num_tokens)
        check_text(self._text)
        logprobs = self._joined_logprobs()  # nothing after it fails: a buffer can become a value once
        text = {"text": text_of(self._text), "prompt_logprobs": None} if self._has_text else {}
        return {
            "stop_reason": None,
            **last,
            **text,
            "index": self.index,
            "logprobs": logprobs,
            "token_ids": list_of(self._ids) if self._ids else [],
            "prompt_token_ids": self._prompt,
        }

    def _joined_logprobs(self) -> dict[str, Raw] | None:
        offsets = self._counted_offsets() if _OFFSETS in self._logprobs else {}
        return {key: list_of(so_far) for key, so_far in self._logprobs.items()} | offsets or None

    def _counted_offsets(self) -> dict[str, Raw]:
        if "tokens" not in self._logprobs:
            raise ValueError("log-probs have offsets of tokens, and no tokens")
        names = _names(b"[%b]" % bytes(self._logprobs["tokens"][1:]))
        return {_OFFSETS: Raw(encoded(_offsets(names)))}


def _offsets(tokens: Sequence[str]) -> list[int]:
    """Where each token's name begins in all names.

    Each chunk counts from its own start, from the text before or from the names before, by the kind and version of its
    engine.
    """
    return list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)]
