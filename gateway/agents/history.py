"""The prompt of an agent's turn: it begins with the very ids of the call that it follows, where there is one.

Engines render conversations from text, so an answer comes back in other ids than it was sampled in: parsers drop
whitespace, clients write other JSON, templates delete reasoning. A trainer needs the sampled ids. So where a turn's
messages begin with those of an earlier call and its answer, its prompt is the ids of this call and a tail, the new
messages as the template renders them. Where the tail is not sure, the whole turn is rendered. Its prompt has a parent
if it begins with all ids of an earlier call, and else it is the root of a new tree, with a reason. Nothing is guessed.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from engines.engine import Json
from engines.raw_json import NO_JSON, decoded
from gateway.agents.media import media_in
from gateway.agents.tails import Tail, Tails
from gateway.agents.turn import Turn, chat_request

# For clients that name no limit, such as Codex: a model that repeats itself would fill the whole context.
_MAX_TOKENS = 32_768
_DIGEST_BYTES = 8
_bytes = msgspec.json.Encoder(order="sorted").encode
# Why a turn is a root.
FIRST = "first"  # a conversation begins: that of a session or a subagent, or the one after a compaction
CHANGED = "changed"  # the client has sent back other messages than it was given
TOOLS = "tools"  # the messages are those of an earlier call; the model, the tools or the template's fields are not
MEDIA = "media"  # the turn has images, sound or video, whose places in the prompt an engine has to tell
TEMPLATE = "template"  # it moves or changes what came before, or ends an answer in another way than it was sampled
UNKNOWN = "unknown"  # no engine renders the turn, so it has no ids


@dataclass(frozen=True, slots=True)
class End:
    """How a call ended: the lengths of its prompt and of all its ids, and some of the last of these."""

    finish_reason: str
    stop_reason: str | int | None
    num_prompt: int
    length: int
    last: list[int]

    @property
    def by_token(self) -> bool:
        """True if a token of the model's own ended it, and not a limit or a stop string."""
        return self.finish_reason in ("stop", "tool_calls") and not isinstance(self.stop_reason, str)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A turn as token ids. `parent` is the call whose ids, prompt and sampled, it begins with; without one,
    `root_reason` tells why. `sampling` are the engine's sampling parameters, `features` those of media."""

    token_ids: list[int]
    parent: int | None
    root_reason: str | None
    sampling: Json
    features: Json | None


@dataclass(frozen=True, slots=True)
class _Match:
    """The longest beginning of a turn that is an earlier call with its answer: `num_messages`. `root_reason` tells why
    no tail can follow this call, or that there is none; None where a tail can."""

    call: int | None
    num_messages: int
    root_reason: str | None


_UNFOLLOWED: tuple[None, list[int], bool] = None, [], False


class History:
    """The ended calls of one session. `ids_of` gives the ids of a call: its prompt and what was sampled."""

    def __init__(self, ids_of: Callable[[int], "array[int]"]) -> None:
        self._ids_of = ids_of
        self._ends: dict[int, End] = {}
        self._calls: dict[bytes, int] = {}  # the latest call with this digest
        self._chains: set[bytes] = set()  # digests of messages alone

    def digest(self, turn: Turn, message: Json) -> bytes:
        """Return the digest of a turn with its answer, a message as an engine's parsers give it: 16 bytes."""
        *_, chain = message_digests([*turn.messages, message | {"role": "assistant"}])
        return settings_digest(turn) + chain

    def add(self, call: int, digest: bytes, end: End) -> None:
        """Have later turns follow a call that has ended."""
        self._ends[call] = end
        self._calls[digest] = call
        self._chains.add(digest[_DIGEST_BYTES:])

    async def prompt(self, turn: Turn, tails: Tails) -> Prompt | None:
        """Return a turn as token ids; None where no engine of its model renders it. Raise the engine's refusal."""
        settings = settings_digest(turn)
        match = self._match(turn, settings)
        followed, rest, is_sure = await self._followed(turn, match, settings, tails)
        if is_sure:
            return followed
        rendered = await tails.rendering.render(chat_request(turn))
        if rendered is None:
            return None
        token_ids = rendered["token_ids"]
        if followed and token_ids[len(token_ids) - len(rest) :] == rest:
            return followed
        parent = self._parent(array("i", token_ids), match)
        reason = None if parent is not None else match.root_reason or TEMPLATE
        return Prompt(token_ids, parent, reason, _sampling(turn, rendered), rendered.get("features") or None)

    def _match(self, turn: Turn, settings: bytes) -> _Match:
        call, num_messages, num_known = None, 0, 0
        for number, chain in enumerate(message_digests(turn.messages if self._ends else []), 1):
            if chain in self._chains:
                num_known = number
                if (found := self._calls.get(settings + chain)) is not None:
                    call, num_messages = found, number
        reason = None
        new = turn.messages[num_messages:]
        if not self._ends or not any(message["role"] == "assistant" for message in turn.messages):
            reason = FIRST
        elif any(media_in(turn.messages)):
            reason = MEDIA
        elif num_known > num_messages:
            reason = TOOLS
        elif call is None or not new or any(message["role"] == "assistant" for message in new):
            reason = CHANGED
        return _Match(call, num_messages, reason)

    async def _followed(
        self, turn: Turn, match: _Match, settings: bytes, tails: Tails
    ) -> tuple[Prompt | None, list[int], bool]:
        """Return the prompt of a turn after the call that it follows, what of it comes after the call's ids, and
        whether that is sure. `_UNFOLLOWED` where the whole turn has to be rendered."""
        if match.call is None or match.root_reason:
            return _UNFOLLOWED
        before = self._ids_of(match.call)
        end, answer = self._ends[match.call], turn.messages[match.num_messages - 1]
        tail = await tails.after(match.num_messages, turn, settings)
        if tail is None:
            return _UNFOLLOWED
        num_closed = _num_closed(tail, end, before[-1], bool(answer.get("tool_calls")))
        if num_closed is None:
            return _UNFOLLOWED
        rest = tail.token_ids[num_closed:]
        sampling = _sampling(turn, tail.rendered)
        if (room := tails.rendering.room(turn.model)) is not None:
            left = room - len(before) - len(rest)
            if left < 1:
                return _UNFOLLOWED  # the engine has words for this
            if sampling["max_tokens"] >= room - len(tail.rendered["token_ids"]):  # what the stub leaves
                sampling["max_tokens"] = turn.max_tokens or _MAX_TOKENS
            sampling["max_tokens"] = min(sampling["max_tokens"], left)
        prompt = Prompt(before.tolist() + rest, match.call, None, sampling, None)
        return prompt, rest, tail.is_sure(before[: end.num_prompt])

    def _parent(self, token_ids: "array[int]", match: _Match) -> int | None:
        """Return the longest call whose ids a rendered prompt begins with."""
        if match.root_reason == FIRST:
            return None
        # Images have equal ids, only messages tell them apart.
        calls = self._ends if match.root_reason != MEDIA else [match.call] if match.call is not None else []
        ends = sorted(((self._ends[call].length, call) for call in calls), reverse=True)
        for length, call in ends:
            last = self._ends[call].last
            may_be = token_ids[max(0, length - len(last)) : length].tolist() == last
            if may_be and token_ids[:length] == self._ids_of(call):
                return call
        return None


def _num_closed(tail: Tail, end: End, last: int, has_calls: bool) -> int | None:
    """Return how many ids of a tail the answer has already, to its end token. None where that is not known: an answer
    ended with another token than its template has it, or was cut off after calls, whose own last ids differ."""
    closing = tail.token_ids[: tail.num_closing]
    if end.by_token:
        return closing.index(last) + 1 if last in closing else None
    if has_calls:
        return None
    return 1 if closing[:1] == [last] else 0


def _sampling(turn: Turn, rendered: Json) -> Json:
    sampling = dict(rendered["sampling_params"])
    if turn.max_tokens is None:
        sampling["max_tokens"] = min(sampling["max_tokens"], _MAX_TOKENS)
    return sampling


def settings_digest(turn: Turn) -> bytes:
    """Return the digest of what a template reads beside the messages."""
    return blake2b(_bytes([turn.model, turn.tools, turn.template]), digest_size=_DIGEST_BYTES).digest()


def message_digests(messages: list[Json]) -> Iterator[bytes]:
    """Yield after each message the digest of it and all before it."""
    chain = blake2b(digest_size=_DIGEST_BYTES)
    for message in messages:
        said = _bytes(_canonical(message))
        chain.update(len(said).to_bytes(8, "little") + said)
        yield chain.digest()


def _canonical(message: Json) -> list[Any]:
    """What a message says. Clients drop reasoning, make new ids, move `cache_control`, trim texts, cut them into other
    parts, and write the arguments of calls in their own JSON."""
    texts, others = [], []
    content = message.get("content") or ""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        else:
            others.append({name: value for name, value in part.items() if name != "cache_control"})
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    asked = [[call["name"], _arguments(call.get("arguments"))] for call in calls]
    return [message["role"], "".join(texts).strip(), others, asked]


def _arguments(given: Any) -> Any:
    try:
        return _plain(decoded(given or "{}") if isinstance(given, str) else given or {})
    except NO_JSON:
        return given


def _plain(value: Any) -> Any:
    """JSON as JavaScript writes it back, which has no other 1.0 than 1."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case _:
            return value
