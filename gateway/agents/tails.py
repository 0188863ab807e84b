"""Renders what follows an answer: its closing tokens, the new messages, and the opening of the next answer.

Templates render whole conversations alone. So new messages are rendered after a stub: a system message where the turn
has one, a user's message, and an answer that ends with a mark. The ids after the mark follow any answer of the stub's
form, but under a template that moves text or looks further back: `Tails.after` and `Tail.is_sure` tell these.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.engine import Json
from engines.errors import EngineRefused
from engines.raw_json import encoded
from gateway.agents.turn import Turn, chat_request
from gateway.dialects.rendering import Rendering

# Words that begin and end with other letters, so that no two have their first or last token in common.
_SYSTEM, _USER = "wibyuk", "qavxoz"
_MARKS = "jecnumdip", "hoglarfet"
_NEXT = "zotkevbis.", "fyrnaxel"  # what follows a text is joined to its last character by some tokenizers
_ROLES_AT_FRONT = "system", "developer"
_MAX_FORMS = 64
_KEPT_S = 60.0  # some templates name the day, and an engine may come back with another template


@dataclass(frozen=True, slots=True)
class Tail:
    """The ids after an answer's text. Its end token is among the first `num_closing`. `opening` are the ids that open
    the next answer, `opening_before` those that opened this one in a bare conversation; empty where not known.
    `rendered` has the sampling parameters."""

    token_ids: list[int]
    num_closing: int
    opening: list[int]
    opening_before: list[int]
    rendered: Json

    def is_sure(self, prompt: Sequence[int]) -> bool:
        """True if this prompt opened the answer as a bare conversation does, so that nothing before the stub has a say
        in the opening of the next."""
        return _is_end(self.opening, self.token_ids) and _is_end(self.opening_before, prompt)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a template renders a stub. `head` are the ids to the end of the user's message, `mark` those of the mark,
    `tail` those after it, `openings` those that open an answer, by the role of the message before."""

    head: list[int]
    mark: list[int]
    tail: list[int]
    openings: dict[str, list[int]]


class Tails:
    """The tails of turns. Forms are learned once for all turns with the same settings, of whichever session."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self._forms: dict[tuple[bytes, str, bool], tuple[float, _Form | None]] = {}
        self._learning = asyncio.Lock()

    async def after(self, num_messages: int, turn: Turn, settings: bytes) -> Tail | None:
        """Return the tail of a turn after the answer that ends its first messages.

        None where the template refuses the stub, leaves text of it out, or changes what stands before the answer when
        new messages come, such as tools that stand before the last user's message.
        """
        answer, new = turn.messages[num_messages - 1], turn.messages[num_messages:]
        front = turn.messages[0]["role"] if turn.messages[0]["role"] in _ROLES_AT_FRONT else ""
        stub = _Stub(turn, front, answer.get("tool_calls") or [], self.rendering)
        form = await self._form(stub, settings)
        rendered = form and await stub.rendered(_MARKS[0], new)
        if not form or not rendered or not _is_begin(form.head, rendered["token_ids"]):
            return None
        begin = _index(rendered["token_ids"], form.mark, len(form.head))
        if begin is None:
            return None
        token_ids = rendered["token_ids"][begin + len(form.mark) :]
        before = turn.messages[num_messages - 2]["role"] if num_messages > 1 else ""
        opening, opening_before = (self._opening(settings, front, role) for role in (new[-1]["role"], before))
        return Tail(token_ids, _num_equal(token_ids, form.tail), opening, opening_before, rendered)

    async def _form(self, stub: "_Stub", settings: bytes) -> _Form | None:
        key = settings, stub.front, bool(stub.calls)
        if not self._is_fresh(key):
            async with self._learning:  # sessions that begin at once learn it once
                if not self._is_fresh(key):
                    form = await _learned(stub)
                    self._forms.pop(key, None)
                    self._forms[key] = time.monotonic(), form
                    while len(self._forms) > _MAX_FORMS:
                        self._forms.pop(next(iter(self._forms)))
        return self._forms[key][1]

    def _is_fresh(self, key: tuple[bytes, str, bool]) -> bool:
        return key in self._forms and time.monotonic() < self._forms[key][0] + _KEPT_S

    def _opening(self, settings: bytes, front: str, role: str) -> list[int]:
        """Return the ids that open an answer to a message of this role; none where they are not known."""
        for has_calls in (True, False):
            _, form = self._forms.get((settings, front, has_calls), (0.0, None))
            if form and role in form.openings:
                return form.openings[role]
        return []


async def _learned(stub: "_Stub") -> _Form | None:
    users: list[list[Json]] = [[{"role": "user", "content": text}] for text in _NEXT]
    results = [[{"role": "tool", "tool_call_id": call["id"], "content": text} for call in stub.calls] for text in _NEXT]
    asked = await stub.rendered()
    plain = await replace(stub, calls=[]).rendered(_MARKS[0], users[0])
    if not asked or not plain:
        return None
    bare, one = asked["token_ids"], plain["token_ids"]
    openings = {"user": _common_end(bare, one)}
    if stub.calls:
        called, other_result = [await stub.rendered(_MARKS[0], result) for result in results]
        if not called or not other_result:
            return None
        one = called["token_ids"]
        openings["tool"] = _common_end(one, other_result["token_ids"])
    marked = await stub.rendered(_MARKS[1], results[0] if stub.calls else users[0])
    # To the token after the user's text, which ends it or opens the answer.
    head = bare[: len(bare) - len(openings["user"]) + 1]
    if not marked or not openings["user"] or not _is_begin(head, one):
        return None
    begin, tail = _num_equal(one, marked["token_ids"]), _common_end(one, marked["token_ids"])
    mark = one[begin : len(one) - len(tail)]
    return _Form(head, mark, tail, openings) if mark else None


@dataclass(frozen=True, slots=True)
class _Stub:
    """A conversation under the settings of a turn. Names and ids of calls are those of the answer, since templates
    repeat these in results."""

    turn: Turn
    front: str
    calls: list[Json]
    rendering: Rendering

    async def rendered(self, mark: str | None = None, new: Sequence[Json] = ()) -> Json | None:
        """Return the stub as an engine renders it, with an answer where there is a mark; None where its template
        refuses it."""
        front = [{"role": self.front, "content": _SYSTEM}] if self.front else []
        answer = [] if mark is None else [self._answer(mark)]
        messages = [*front, {"role": "user", "content": _USER}, *answer, *new]
        try:
            return await self.rendering.render(chat_request(replace(self.turn, messages=messages)))
        except EngineRefused:
            return None

    def _answer(self, mark: str) -> Json:
        if not self.calls:
            return {"role": "assistant", "content": mark}
        arguments = ["{}"] * (len(self.calls) - 1) + [encoded({"text": mark}).decode()]
        calls = [
            {**call, "function": {**call["function"], "arguments": given}}
            for call, given in zip(self.calls, arguments, strict=True)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def _num_equal(one: Sequence[int], two: Sequence[int]) -> int:
    """Return the number of ids that both begin with."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(two)))


def _common_end(one: list[int], two: list[int]) -> list[int]:
    return one[len(one) - _num_equal(one[::-1], two[::-1]) :]


def _is_begin(part: list[int], token_ids: list[int]) -> bool:
    return token_ids[: len(part)] == part


def _is_end(part: list[int], token_ids: Sequence[int]) -> bool:
    return bool(part) and list(token_ids[-len(part) :]) == part


def _index(token_ids: list[int], part: list[int], start: int) -> int | None:
    """Return where a part begins."""
    begins = range(start, len(token_ids) - len(part) + 1)
    return next((index for index in begins if token_ids[index : index + len(part)] == part), None)
