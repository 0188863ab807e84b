"""Renders what follows an answer: its closing tokens, the new messages, and the opening of the next answer.

Templates render whole conversations alone. So new messages are rendered after a stub: a user's message, and an answer
that ends with a mark. The ids after the mark follow any answer of the stub's form, but under a template that moves
text or looks further back: `Tails.after` and `Tail.is_sure` tell these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.engine import Json
from engines.errors import EngineRefused
from gateway.agents.turn import Turn, chat_request
from gateway.dialects.raw_json import encoded
from gateway.dialects.rendering import Rendering

# Words that begin and end with other letters, so that no two have their first or last token in common.
_USERS = ("qavxoz", "wibyuk")
_ANSWERS = ("jecnumdip", "hoglarfet")
_NEXT = "zotkevbis"
_MARK = 3  # tokens at the end of a word that find it again


@dataclass(frozen=True, slots=True)
class Tail:
    """The ids after an answer's text. Its end token is among the first `num_closing`; `opening` are the ids that open
    an answer to a user; `rendered` has the sampling parameters."""

    token_ids: list[int]
    num_closing: int
    opening: list[int]
    rendered: Json

    def is_sure(self, prompt: Sequence[int]) -> bool:
        """True if the next answer is opened as that after this prompt was: nothing before the stub has a say in it."""
        size = len(self.opening)
        return size > 0 and self.token_ids[-size:] == list(prompt[-size:]) == self.opening


@dataclass(frozen=True, slots=True)
class _Form:
    """How a template renders a stub. `head` are the ids before its answer, `mark` the last of the answer's text, `tail`
    those after it, `opening` those that open an answer to a user."""

    head: list[int]
    mark: list[int]
    tail: list[int]
    opening: list[int]


class Tails:
    """The tails of the turns of one session. Forms are learned once for all turns with the same settings."""

    def __init__(self) -> None:
        self._forms: dict[tuple[bytes, bool], _Form | None] = {}

    async def after(
        self, answer: Json, new: list[Json], turn: Turn, settings: bytes, rendering: Rendering
    ) -> Tail | None:
        """Return the tail of new messages after an answer.

        None where the template refuses the stub, leaves text of it out, or puts text before it that the messages of a
        turn without these do not have, such as tools that stand before the last user's message.
        """
        stub = _Stub(turn, answer.get("tool_calls") or [], rendering)
        key = settings, bool(stub.calls)
        if key not in self._forms:
            self._forms[key] = await _learned(stub)
        form = self._forms[key]
        rendered = form and await stub.rendered(_USERS[0], _ANSWERS[0], new)
        if not form or not rendered or rendered["token_ids"][: len(form.head)] != form.head:
            return None
        begin = _index(rendered["token_ids"], form.mark, len(form.head))
        if begin is None:
            return None
        token_ids = rendered["token_ids"][begin + len(form.mark) :]
        return Tail(token_ids, _num_equal(token_ids, form.tail), form.opening, rendered)


async def _learned(stub: "_Stub") -> _Form | None:
    user: list[Json] = [{"role": "user", "content": _NEXT}]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": _NEXT} for call in stub.calls]
    asked = await stub.rendered(_USERS[0])
    plain = await replace(stub, calls=[]).rendered(_USERS[0], _ANSWERS[0], user)
    first = await stub.rendered(_USERS[0], _ANSWERS[0], results) if results else plain
    second = await stub.rendered(_USERS[1], _ANSWERS[1], results or user)
    if not asked or not plain or not first or not second:
        return None
    bare, one, two = asked["token_ids"], first["token_ids"], second["token_ids"]
    head, begin = _num_equal(one, bare), len(one) - _num_equal(one[::-1], two[::-1])
    if not _num_equal(one, two) < head <= begin - _MARK:
        return None  # text stands before the user's, or the mark is missing
    opening = bare[len(bare) - _num_equal(plain["token_ids"][::-1], bare[::-1]) :]
    return _Form(one[:head], one[begin - _MARK : begin], one[begin:], opening)


@dataclass(frozen=True, slots=True)
class _Stub:
    """A conversation under the settings of a turn. Names and ids of calls are those of the answer, since templates
    repeat these in results."""

    turn: Turn
    calls: list[Json]
    rendering: Rendering

    async def rendered(self, user: str, answer: str | None = None, new: Sequence[Json] = ()) -> Json | None:
        """Return the stub as an engine renders it; None where its template refuses it."""
        messages = [{"role": "user", "content": user}]
        if answer is not None:
            messages.append(self._answer(answer))
        try:
            return await self.rendering.render(chat_request(replace(self.turn, messages=[*messages, *new])))
        except EngineRefused:
            return None

    def _answer(self, text: str) -> Json:
        if not self.calls:
            return {"role": "assistant", "content": text}
        arguments = ["{}"] * (len(self.calls) - 1) + [encoded({"text": text}).decode()]
        calls = [
            {**call, "function": {**call["function"], "arguments": given}}
            for call, given in zip(self.calls, arguments, strict=True)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def _num_equal(one: Sequence[int], two: Sequence[int]) -> int:
    """Return the number of ids that both begin with."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(two)))


def _index(token_ids: list[int], part: list[int], start: int) -> int | None:
    """Return where a part begins."""
    begins = range(start, len(token_ids) - len(part) + 1)
    return next((index for index in begins if token_ids[index : index + len(part)] == part), None)
