"""Joins the chunks of an engine's stream into the reply that it would have sent as a whole.

Replies are read in chunks so that the tokens are here if the engine dies. Engines that we start send coarse chunks,
which cost them nothing; the samples of one prompt even gain by it (vLLM 0.26 made 9 % more tokens). A short single
sample is read whole: it has few tokens to lose, and chunks cost this process three times the CPU.
"""

from itertools import accumulate
from typing import Any

from engines.engine import Json
from engines.errors import EngineFailed
from engines.types import ReplicaInfo
from gateway.fleet.placement.routing import Rollout

# Fields with which vLLM refuses to stream, or streams in another shape.
_WHOLE_ONLY = ("prompt_logprobs", "echo", "use_beam_search")
_SHORT_TOKENS = 64  # two coarse chunks


def is_read_in_chunks(body: Json, limit: int, rollout: Rollout, info: ReplicaInfo) -> bool:
    """True if this engine's reply to `body`, of at most `limit` tokens a sample, is read in chunks.

    A rest is, however short: where engines die in a row, each is to add tokens.
    """
    is_worth_it = rollout.n > 1 or limit > _SHORT_TOKENS or rollout.goes_on
    return (
        is_worth_it and info.streams and all(body.get(field) is None or body[field] is False for field in _WHOLE_ONLY)
    )


class Assembly:
    """The chunks of one prompt with `n` samples. `has_text` is False for replies of token ids alone."""

    def __init__(self, n: int, replica_id: str, *, has_text: bool = True) -> None:
        self._replica_id = replica_id
        self._head: Json = {}
        self._samples = [_Sample(index, has_text=has_text) for index in range(n)]

    def add(self, chunk: Json) -> None:
        self._head = self._head or {key: value for key, value in chunk.items() if key not in ("choices", "usage")}
        if (usage := chunk.get("usage")) is not None:
            self._head["usage"] = usage
        for choice in chunk["choices"]:
            self._samples[choice["index"]].add(choice)

    def reply(self) -> Json:
        """The whole reply. Raises `EngineFailed` if a sample began and did not end, or has tokens that do not count."""
        for sample in self._samples:
            if not sample.has_ended:
                raise EngineFailed(
                    f"the stream ended before sample {sample.index} did, after {len(sample.token_ids)} tokens",
                    replica_id=self._replica_id,
                )
        self._check_count()
        return self._head | {"choices": [sample.choice() for sample in self._samples]}

    def part(self) -> Json | None:
        """The reply as far as it came, `finish_reason` None where a sample has not ended; None without any token."""
        if not any(sample.token_ids for sample in self._samples) or self._surplus > 0:
            return None
        for sample in self._samples:
            sample.opened()
        return self._head | {"choices": [sample.choice() for sample in self._samples]}

    @property
    def _surplus(self) -> int:
        """Tokens beyond those that the engine counts."""
        counted = (self._head.get("usage") or {}).get("completion_tokens")
        return 0 if counted is None else sum(len(sample.token_ids) for sample in self._samples) - int(counted)

    def _check_count(self) -> None:
        if (surplus := self._surplus) > 0:
            raise EngineFailed(
                f"its chunks have {surplus} tokens more than its usage counts", replica_id=self._replica_id
            )


class _Sample:
    """The chunks of one sample, joined. vLLM sends none for a sample that was aborted before its first token."""

    def __init__(self, index: int, *, has_text: bool) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self._has_text = has_text
        self._text: list[str] = []
        self._prompt_token_ids: list[int] | None = None
        self._logprobs: dict[str, list[Any]] = {}
        self._last: Json = {"finish_reason": "abort"}

    @property
    def has_ended(self) -> bool:
        return self._last.get("finish_reason") is not None

    def add(self, choice: Json) -> None:
        self._text.append(choice.get("text") or "")
        self.token_ids += choice.get("token_ids") or ()
        self._prompt_token_ids = choice.get("prompt_token_ids") or self._prompt_token_ids
        for key, entries in (choice.get("logprobs") or {}).items():
            self._logprobs.setdefault(key, []).extend(entries)
        self._last = choice

    def opened(self) -> None:
        """A sample without any chunk has not ended when the stream breaks."""
        if not self.token_ids:
            self._last = {"finish_reason": None}

    def choice(self) -> Json:
        text = {"text": "".join(self._text), "prompt_logprobs": None} if self._has_text else {}
        if "text_offset" in self._logprobs:
            self._logprobs["text_offset"] = _offsets(self._logprobs["tokens"])
        return {
            "stop_reason": None,
            **self._last,
            **text,
            "index": self.index,
            "logprobs": self._logprobs or None,
            "token_ids": self.token_ids,
            "prompt_token_ids": self._prompt_token_ids,
        }


def _offsets(tokens: list[str]) -> list[int]:
    """Where each token's name begins in all names; chunks count from their own start, or from text."""
    return list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)]
