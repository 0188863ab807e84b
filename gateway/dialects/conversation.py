"""A conversation of /v1/chat/completions as a rollout: the body for an engine, and what its client has of a stream."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from engines.engine import Json
from engines.types import Dialect
from gateway.dialects.runner import Ask
from gateway.dialects.sample import Reply
from gateway.fleet.replica import Replica

PATH = "/v1/chat/completions"
_TEXT_PARTS = ("text", "input_text", "refusal")


@dataclass(kw_only=True)
class Conversation(Ask):
    """One conversation as its body asks for it.

    `reads_whole_reply` is True where no engine parses the tokens of a reply that was read in chunks. `inexact_of` tells
    the fields with which it continues.
    """

    inexact_of: Callable[[Json], tuple[str, ...] | None]
    reads_whole_reply: bool = False

    # vLLM's parsers hold text back, and release it at the end of a stream, also where that is a cut.
    streams_continue: ClassVar[bool] = False

    @cached_property
    def inexact(self) -> tuple[str, ...] | None:
        return self.inexact_of(self.body)

    @property
    def _streams_ids(self) -> bool:
        """False where vLLM leaves out reasoning, and the token ids of a stream with it."""
        return self.body.get("include_reasoning") is not False

    def reads_whole(self, replica: Replica) -> bool:
        return (
            self.reads_whole_reply
            or replica.info.dialect is not Dialect.VLLM  # SGLang tells no token ids in the stream of a conversation
            or super().reads_whole(replica)
            or not (self.resumes and self._streams_ids)
        )

    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        ids = {} if streams and not self._streams_ids else {"return_token_ids": True}
        return PATH, {**self.body, **ids}

    def told(self, reply: Reply) -> Json:
        return super().told(reply) | {"prompt_token_ids": reply.prompt}

    def bare(self) -> Json:
        return {"delta": {"content": ""}, "logprobs": None, "token_ids": []}

    def bare_head(self) -> Json:
        head = {"id": f"chatcmpl-{self.rollout.request_id}", "object": "chat.completion.chunk"}
        return head | {"created": int(time.time()), "model": self.body.get("model") or self.rollout.model}

    def as_asked(self, told: Json) -> Json:
        """Without the token ids that the client did not ask for."""
        if not self.body.get("return_token_ids"):
            for one in (told, *told["choices"]):
                one |= {key: None for key in ("token_ids", "prompt_token_ids") if key in one}
        return told

    def shows(self, choice: Json) -> bool:
        """True if a choice has something for the client: vLLM sends ids also of text that its parsers hold back."""
        fields = ("delta", "finish_reason", "logprobs") + (("token_ids",) if self.body.get("return_token_ids") else ())
        return any(choice.get(field) for field in fields)


def is_medium(part: Any) -> bool:
    """True for a part of a message that is an image, a sound or a video."""
    return isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS
