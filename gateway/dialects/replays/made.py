"""What a gateway before this one noted of a batch, as replies whose open samples continue."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import orjson
import structlog

from engines.engine import Json
from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.raw_json import NO_JSON
from gateway.dialects.replays.batch import Came, Cut, Note, Path
from gateway.dialects.sample import Reply, Sample
from gateway.fleet.replica import Flight

log = structlog.get_logger()

_note = msgspec.msgpack.Decoder(Note).decode


@dataclass(slots=True)
class _Node:
    """A prompt or a rest: its reply as far as it was cut, or the chunks of its last attempt."""

    cut: Json | None = None
    last: Came | None = None
    chunks: list[bytes] = field(default_factory=list)
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

    async def of(self, prompt: CompletionPrompt) -> Reply | None:
        """Return the reply to a prompt as far as it was made; None where it restarts. A long one takes its time."""
        async with self._turn:
            await asyncio.sleep(0)
            try:
                return _reply(self._prompts.pop(prompt.index, None), prompt)
            except NO_JSON as error:
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
        node = beside.setdefault(last, _Node())
        if node.last is None or node.last.attempt != note.attempt:
            node.chunks = []
        node.last = note
        node.chunks += note.chunks

    def _beside(self, path: Path) -> dict[int, _Node]:
        """The nodes among which the path's is."""
        nodes = self._prompts
        for place in path[:-1]:
            nodes = nodes[place].rests
        return nodes


def _reply(node: _Node | None, prompt: CompletionPrompt) -> Reply | None:
    if node is None:
        return None
    reply = Reply(prompt.read)
    if node.cut:
        reply = Reply.of(node.cut)
    elif not _read(node, prompt, reply, [Sample(index) for index in range(prompt.rollout.n)]):
        return None
    for sample in reply.open:
        if (rest := node.rests.get(sample.index)) is not None:
            _continue(rest, prompt, reply, sample)
    return reply


def _continue(node: _Node, prompt: CompletionPrompt, reply: Reply, sample: Sample) -> None:
    """Take what was made of a sample after it was cut off."""
    if node.cut:
        sample = reply.samples[sample.index] = Sample.of(node.cut["choices"][0])
    sample.rest = rest = Sample(sample.index)
    if node.last is not None and _read(node, prompt.rest(reply, sample), reply, [rest]):
        sample.join(rest, len(reply.prompt or ()))
    sample.rest = None


def _read(node: _Node, prompt: CompletionPrompt, reply: Reply, samples: list[Sample]) -> bool:
    """Read the chunks of an attempt. False where they are nothing with which samples continue, or end."""
    assert node.last is not None
    if prompt.before is None:
        reply.samples = samples
    for event in node.chunks:
        reply.read(event, samples)
    for sample in samples:
        sample.cut()
    is_whole = all(not sample.is_open for sample in samples)
    made = any(sample.num_made for sample in samples)
    if not is_whole and (node.last.is_whole or not (made and prompt.resumes and reply.prompt)):
        return False
    flight = Flight.of(node.last.versions, node.last.kv_versions)
    for sample in samples:
        sample.stamp(flight, prompt.rollout.adapter, reply.counted if len(samples) == 1 else None)
    return True
