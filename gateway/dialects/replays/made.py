"""What a gateway before this one noted of a batch, as replies whose open samples continue."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import orjson
import structlog

from engines.engine import Json
from engines.errors import EngineFailed
from gateway.dialects.completion_prompt import PATH, CompletionPrompt
from gateway.dialects.replays.batch import Came, Cut, Note, Path
from gateway.dialects.replies.assembly import Assembly
from gateway.dialects.replies.carried import carried_reply, opened
from gateway.dialects.resumption.features import marked
from gateway.dialects.resumption.tokens import CUT_OFF, joined
from gateway.dialects.runner import check_reply, kept_part
from gateway.dialects.spans import stamp_versions
from gateway.dialects.usage import usage_of_joined
from gateway.fleet.flight import Flight

log = structlog.get_logger()

_ABORT = "abort"
_note = msgspec.msgpack.Decoder(Note).decode


@dataclass(slots=True)
class _Node:
    """A prompt or a rest: its reply as far as it was cut, or the chunks of its last attempt."""

    cut: Json | None = None
    last: Came | None = None
    chunks: list[list[bytes]] = field(default_factory=list)
    rests: "dict[int, _Node]" = field(default_factory=dict)


class Made:
    """The notes of one batch."""

    def __init__(self, notes: Iterable[bytes]) -> None:
        """Raise `ValueError` or `KeyError` where they cannot be read."""
        self._prompts: dict[int, _Node] = {}
        self._turn = asyncio.Lock()
        self.newest = 0
        """The newest weight version of the model among its tokens."""
        for note in notes:
            self._take(_note(note))

    async def of(self, prompt: CompletionPrompt) -> Json | None:
        """Return the reply to a prompt as far as it was made; None where it restarts. A long one takes its time."""
        async with self._turn:
            await asyncio.sleep(0)
            try:
                return _reply(self._prompts.pop(prompt.index, None), prompt)
            except (ValueError, KeyError, TypeError, IndexError, EngineFailed) as error:
                log.error("a prompt in the ledger cannot be read", prompt=prompt.rollout.request_id, error=repr(error))
                return None

    def _take(self, note: Note) -> None:
        beside, last = self._beside(note.path), note.path[-1]
        if isinstance(note, Cut):
            answer = orjson.loads(note.answer)
            beside[last] = _Node(cut=answer)
            spans = [span for choice in answer["choices"] for span in choice.get("weight_versions") or ()]
            self.newest = max((self.newest, *(span.get("base_version", span["version"]) for span in spans)))
            return
        self.newest = max((self.newest, *note.versions))
        node = beside.get(last)
        if node is None or node.last is None or node.last.attempt != note.attempt:
            node = beside[last] = _Node()
        node.last = note
        node.chunks.append(note.chunks)

    def _beside(self, path: Path) -> dict[int, _Node]:
        """The nodes among which the path's is."""
        nodes = self._prompts
        for place in path[:-1]:
            nodes = nodes[place].rests
        return nodes


def _reply(node: _Node | None, prompt: CompletionPrompt) -> Json | None:
    answer = node and (node.cut or _read(node, prompt))
    if node is None or not answer:
        return None
    for place, choice in enumerate(answer["choices"]):
        if choice["finish_reason"] == CUT_OFF:
            answer["choices"][place] = _continued(node.rests.get(choice["index"]), prompt, choice)
    return answer | {"usage": usage_of_joined(answer, answer["choices"])}


def _continued(node: _Node | None, prompt: CompletionPrompt, choice: Json) -> Json:
    rest = _reply(node, prompt.rest_of(choice)) if node else None
    if rest is None:
        return choice
    [its] = rest["choices"]
    whole = joined(choice, its)
    return whole if its["finish_reason"] == CUT_OFF else marked(whole, prompt.inexact or ())


def _read(node: _Node, prompt: CompletionPrompt) -> Json | None:
    assert node.last is not None
    flight = Flight.of(node.last.versions, node.last.kv_versions)
    chunks = [chunk for together in node.chunks for chunk in together]
    if node.last.is_whole:
        return _whole(chunks, prompt, node.last.replica_id, flight)
    assembly = Assembly(prompt.rollout.n, node.last.replica_id)
    if chunks:
        assembly.add(chunks)
    return kept_part(assembly, prompt, flight, lambda choice: choice["finish_reason"] == _ABORT)


def _whole(chunks: list[bytes], prompt: CompletionPrompt, replica_id: str, flight: Flight) -> Json | None:
    """A reply that was read whole; None where it never came, or was cut off."""
    if not chunks:
        return None
    answer = carried_reply(chunks[0], PATH, replica_id)
    check_reply(answer, prompt.rollout.n, replica_id)
    if any(choice["finish_reason"] == _ABORT for choice in answer["choices"]):
        return None
    stamp_versions(answer, flight, prompt.rollout.adapter)
    reply: Json = opened(answer)
    return reply
