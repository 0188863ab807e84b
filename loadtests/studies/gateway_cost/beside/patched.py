"""A gateway whose token work is done by a reader: replaces Part.make in this process."""

import asyncio
import os
import time
from urllib.parse import urlsplit

from msgspec import Raw

from engines.errors import EngineFailed
from gateway.dialects import completions, part
from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.raw_json import NULL, decoded, encoded
from gateway.dialects.sample import Reply, Source
from loadtests.studies.gateway_cost.beside.wire import Ask, Frame, Frames
from engines.clients.http import _completed


class Link:
    """The gateway's end: one connection to the reader of an engine, and who waits there."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._frames = None
        self._waits: dict[int, asyncio.Queue] = {}
        self._number = 0
        self.kept: dict[int, list[bytes]] = {}
        self._opening = asyncio.Lock()

    async def ask(self, kind, path, body, is_whole, num_samples, timeout_s, first, shows_ids):
        if self._frames is None:
            async with self._opening:
                if self._frames is None:
                    loop = asyncio.get_running_loop()
                    _, self._frames = await loop.create_connection(
                        lambda: Frames(Frame, self._received), self._address.hostname, self._address.port
                    )
        self._number += 1
        number = self._number
        queue = self._waits[number] = asyncio.Queue()
        try:
            self._frames.send(Ask(number, kind, path, body, is_whole, num_samples, timeout_s, first, shows_ids))
            while True:
                frame = await queue.get()
                if frame.error:
                    raise EngineFailed(frame.error)
                yield frame
                if frame.is_last:
                    return
        finally:
            del self._waits[number]
            self.kept.pop(number, None)

    def _received(self, frame, _):
        for number, content in frame.kept.items():
            if number in self._waits:
                self.kept.setdefault(number, []).append(content)
        if queue := self._waits.get(frame.number):
            queue.put_nowait(frame)


_link: Link | None = None


def link() -> Link:
    global _link
    if _link is None:
        _link = Link(os.environ["READER_URL"])
    return _link


_whole_make = part.Part.make


async def make(self, replica):
    ask, self._held, self._replica = self._ask, [], replica
    if not isinstance(ask, CompletionPrompt) or ask.before is not None:
        return await _whole_make(self, replica)
    source = Source(replica, replica.take_off(), ask.rollout.adapter)
    for sample in self.samples:
        sample.begin(source)
    path, body = await ask.asked(replica, streams=self._show is not None)
    is_whole = self._show is None and ask.reads_whole(replica)
    body["stream"] = not is_whole
    if not is_whole:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    kind = "samples" if self._show is None else "events"
    parts: dict[int, list] = {}
    async for frame in link().ask(
        kind, path, encoded(body), is_whole, len(self.samples), 600.0, ask.first, bool(ask.body.get("return_token_ids"))
    ):
        replica.evidence.saw_progress()
        if frame.head and not self._reply.head:
            self._reply.head = decoded(frame.head)
        if frame.usage:
            self._reply._usage = frame.usage
        if self._show is None:
            pass
        else:
            await replica.vouched()
            shown = []
            for made in frame.samples:
                sample = self.samples[made.index]
                sample.num_made += made.num_new
                sample.has_ids, sample._last = True, (b"", 0)
                told = {key: Raw(value) for key, value in made.fields.items()}
                lists = {key: Raw(b"[" + value + b"]") for key, value in made.lists.items()}
                told |= {
                    "index": made.index,
                    "text": Raw(b'"' + made.text + b'"'),
                    "token_ids": lists.pop("token_ids", None),
                    "logprobs": lists or None,
                    "finish_reason": made.finish_reason,
                    "weight_version": replica.weight_version,
                }
                if made.report:
                    sample._report = made.report
                if made.finish_reason:
                    sample.reason = made.finish_reason
                    sample.stamp()
                    told |= sample.marks(None)
                shown.append(told)
            if shown or frame.usage:
                self._show({**self._reply.head, "choices": shown} | ({"usage": frame.usage} if frame.usage else {}))
    if self._show is None:
        await replica.vouched()
        for ended in frame.ended:
            sample = self.samples[ended.index]
            sample.kept_frames = []
            sample.num_made, sample.num_unscored, sample.has_ids = ended.num_made, ended.num_unscored, True
            sample.reason, sample._report, sample._ended = ended.finish_reason, ended.report, ended.choice
    self._stamp()


async def write(self, prompt, began, written, reply):
    reply = Reply(prompt.read)
    await self._runner.run(prompt, reply)
    written.head = reply.head | {"usage": reply.usage}
    written.seconds.append(time.monotonic() - began)
    for sample in reply.samples:
        if sample.num_unscored:
            self._runner._metrics.missing_logprobs.inc(sample.num_unscored)
        marks = {"finish_reason": sample.reason} | sample.marks()
        written.choices.append(b"".join((sample._ended, b",", encoded(marks)[1:])))
        written.ends.append({"finish_reason": sample.reason, "weight_versions": sample.spans})


def apply() -> None:
    completions.Completions._write = write
    part.Part.make = make
