"""The prompt of a turn, and the call of its session that it follows."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engines.engine import Json
from gateway.agents.turn import Turn, chat_request
from gateway.dialects.rendering import Rendering

_MAX_TOKENS = 32_768


class End(msgspec.Struct, frozen=True):
    """What later prompts need of an answer's end."""

    finish_reason: str
    stop_reason: str | int | None = None


def end_of(finish_reason: str, stop_reason: str | int | None, prompt: Sequence[int], token_ids: Sequence[int]) -> End:
    """Return the end of an answer after its whole prompt; `token_ids` were sampled."""
    return End(finish_reason, stop_reason)


@dataclass(frozen=True)
class Prompt:
    """A turn as token ids. `parent` is the call whose ids it begins with; without one, `root_reason` says why."""

    token_ids: list[int]
    parent: int | None
    root_reason: str | None
    sampling: Json
    features: Json | None


class History:
    """The calls of one session. `ids_of` gives the ids of a call, its prompt's and the sampled ones."""

    def __init__(self, ids_of: Callable[[int], "array[int]"]) -> None:
        self._ids_of = ids_of
        self._calls: list[int] = []

    async def prompt(self, turn: Turn, rendering: Rendering) -> Prompt | None:
        """Return a turn as token ids; None where no engine of its model renders it. Raise the engine's refusal."""
        rendered = await rendering.render(chat_request(turn))
        if rendered is None:
            return None
        sampling = dict(rendered["sampling_params"])
        if turn.max_tokens is None:
            sampling["max_tokens"] = min(sampling["max_tokens"], _MAX_TOKENS)
        ids = array("i", rendered["token_ids"])
        begun = [(len(own), call) for call in self._calls if ids[: len(own := self._ids_of(call))] == own]
        parent = max(begun)[1] if begun else None
        reason = None if begun else "changed" if self._calls else "first"
        return Prompt(rendered["token_ids"], parent, reason, sampling, rendered.get("features") or None)

    def digest(self, turn: Turn, message: Json) -> bytes:
        """Return the digest of all messages with the answer, in 16 bytes."""
        return hashlib.blake2b(msgspec.json.encode([turn.messages, message]), digest_size=16).digest()

    def add(self, call: int, digest: bytes, ends: End) -> None:
        """Have later turns follow a call that has ended."""
        self._calls.append(call)
