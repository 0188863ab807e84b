"""A conversation of /v1/chat/completions as a rollout: the body for an engine, and what its client has of a stream."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engines.engine import Json
from engines.raw_json import opened
from engines.types import Dialect
from gateway.dialects.completion_prompt import is_read_in_chunks
from gateway.dialects.part import DEFAULT_MAX_TOKENS, Ask
from gateway.dialects.sample import Reply
from gateway.dialects.sampling import versioned_salt
from gateway.fleet.replica import Replica

PATH = "/v1/chat/completions"
_TEXT_PARTS = ("text", "input_text", "refusal")


@dataclass(slots=True)
class DeliveredSample:
    """The tokens of each delivered chunk, the ids of its tool calls, and the chunk that the sample was cut off with."""

    chunks: list[list[int]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    kept: Json | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk]

    def resumed(self, state: Json) -> Json:
        """vLLM's state of this text (`DerenderStreamState`), corrected for the chunks as they were delivered.

        `state` is vLLM's for all delivered tokens as one chunk. Without a parser it holds no tokens and is right.
        """
        if not state.get("output_token_ids"):
            return state
        lengths = [len(chunk) for chunk in self.chunks]
        calls = {"tools_streamed": bool(self.call_ids), "last_tool_call_ids": self.call_ids}
        return state | {"output_chunk_lens": lengths} | calls


class DeliveredChat:
    """The part of each sample that the stream of a conversation delivered before the sample was cut off.

    vLLM's parsers hold text back until they can classify it, and release it with the sample's last chunk, also where
    that is a cut. So the last chunk of a cut-off sample is kept here, and the chunks before are recorded as a parser
    has to see them again.
    """

    def __init__(self) -> None:
        self.samples: dict[int, DeliveredSample] = defaultdict(DeliveredSample)

    def see(self, choice: Json) -> None:
        """Record a choice that is delivered."""
        sample = self.samples[choice["index"]]
        if token_ids := choice.get("token_ids"):
            sample.chunks.append(list(token_ids))
        calls = choice["delta"].get("tool_calls") or ()
        sample.call_ids += [call["id"] for call in calls if call.get("id")]

    def keep(self, choice: Json) -> None:
        """Hold back the choice that a sample was cut off with."""
        self.samples[choice["index"]].kept = choice

    @property
    def kept(self) -> list[Json]:
        return [sample.kept for sample in self.samples.values() if sample.kept is not None]


@dataclass(kw_only=True)
class Conversation(Ask):
    """One conversation as its body asks for it. `delivered` is the part of its stream that the client has.

    `reads_whole_reply` is True where no engine parses the tokens of a reply that was read in chunks. `inexact_of` tells
    the fields with which it continues.
    """

    inexact_of: Callable[[Json], tuple[str, ...] | None]
    delivered: DeliveredChat = field(default_factory=DeliveredChat)
    reads_whole_reply: bool = False

    @cached_property
    def inexact(self) -> tuple[str, ...] | None:
        return self.inexact_of(self.body)

    @property
    def _resumes_stream(self) -> bool:
        """False where vLLM leaves out reasoning, and the token ids of a stream with it."""
        return self.body.get("include_reasoning") is not False and self.resumes

    def reads_whole(self, replica: Replica) -> bool:
        return (
            self.reads_whole_reply
            or replica.info.dialect is not Dialect.VLLM  # SGLang tells no token ids in the stream of a conversation
            or not is_read_in_chunks(self.body, self.limit or DEFAULT_MAX_TOKENS, self.rollout, replica.info)
            or not self._resumes_stream
        )

    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        ids = {} if streams and not self._resumes_stream else {"return_token_ids": True}
        return PATH, {**self.body, "cache_salt": versioned_salt(self.body, replica, self.rollout.adapter), **ids}

    def continues(self, *, streams: bool) -> bool:
        return self._resumes_stream if streams else self.resumes

    def told(self, reply: Reply) -> Json:
        return super().told(reply) | {"prompt_token_ids": reply.prompt}

    def bare(self) -> Json:
        return {"delta": {"content": ""}, "logprobs": None, "token_ids": []}

    def bare_head(self) -> Json:
        head = {"id": f"chatcmpl-{self.rollout.request_id}", "object": "chat.completion.chunk"}
        return head | {"created": int(time.time()), "model": self.body.get("model") or self.rollout.model}

    def shows(self, choice: Json, *, is_cut: bool) -> bool:
        if "token_ids" in choice:
            choice["token_ids"] = opened(choice["token_ids"])
        if is_cut:
            self.delivered.keep(choice)
            return False
        self.delivered.see(choice)
        return self.has_news(choice)

    def has_news(self, choice: Json) -> bool:
        """True if a choice has something for the client: vLLM sends ids also of text that its parsers hold back."""
        fields = ("delta", "finish_reason", "logprobs") + (("token_ids",) if self.body.get("return_token_ids") else ())
        return any(choice.get(field) for field in fields)


def is_medium(part: Any) -> bool:
    """True for a part of a message that is an image, a sound or a video."""
    return isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS
