"""The reader beside an engine: asks it, reads its chunks, joins samples, and sends them as frames."""

import asyncio
import time
from contextlib import aclosing
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvloop
from msgspec import Raw

from engines.clients.http import _completed
from engines.clients.connections import Connections
from gateway.dialects.raw_json import NULL, decoded, encoded, fields_of, inside_list
from gateway.dialects.spans import num_unscored
from gateway.dialects.sample import _BESIDE_HEAD, Chunk, _all_of_choices, _chunk
from loadtests.studies.gateway_cost.beside.wire import Ask, Ended, Frame, Frames, Made
from loadtests.studies.gateway_cost.own_process import until_closed

_FRAME_S, _FRAME_BYTES = 1.0, 1 << 14
_MADE = ("text", "token_ids", "logprobs", "finish_reason", "index", "weight_versions", "prompt_token_ids")
_JSON = {"Content-Type": "application/json"}


class Joined:
    """What was made of one sample since the last frame."""

    def __init__(self, index: int) -> None:
        self.index, self.offset = index, 0
        self.begin()

    def begin(self) -> None:
        self.num_new, self.text, self.lists, self.size = 0, [], {}, 0
        self.reason, self.report, self.last = None, [], None

    def add(self, choice: Any, event: bytes) -> None:
        ids = inside_list(choice.token_ids)
        if ids:
            self._extend("token_ids", ids)
            self.num_new += ids.count(b",") + 1
        for key, value in (choice.logprobs or {}).items():
            self._extend(key, inside_list(value))
        if choice.text:
            self.text.append(choice.text)
        self.report = choice.weight_versions or self.report
        self.reason, self.last = choice.finish_reason, event

    def _extend(self, key: str, items: bytes) -> None:
        so_far = self.lists.setdefault(key, [])
        if items:
            so_far.append(items)
            self.size += len(items)

    def made(self, is_last: bool) -> Made:
        lists = {key: b",".join(items) for key, items in self.lists.items()}
        if "text_offset" in lists:
            lengths = list(map(len, decoded(b"[" + lists["tokens"] + b"]")))
            offsets = list(accumulate(lengths, initial=self.offset))
            self.offset = offsets[-1]
            lists["text_offset"] = encoded(offsets[:-1])[1:-1]
        fields = {}
        if is_last and self.last is not None:
            for choice in _all_of_choices(self.last).choices:
                if decoded(choice["index"]) == self.index:
                    fields = {key: bytes(value) for key, value in choice.items() if key not in _MADE}
        made = Made(
            self.index, self.num_new, encoded("".join(self.text))[1:-1], lists, self.reason, self.report, fields
        )
        self.begin()
        return made


class Whole:
    """One sample: the items of its lists, and how many of them frames have told."""

    def __init__(self, index: int) -> None:
        self.index, self.num_made, self.reason, self.report, self.last = index, 0, None, [], None
        self.lists: dict[str, list[bytes]] = {}
        self.text: list[str] = []
        self.prompt, self.has_ids, self.told = NULL, False, {}

    def add(self, choice: Any, event: bytes) -> None:
        ids = inside_list(choice.token_ids)
        if ids:
            self.lists.setdefault("token_ids", []).append(ids)
            self.num_made += ids.count(b",") + 1
        if choice.token_ids != NULL:
            self.has_ids = True
        if choice.logprobs:
            for key, value in choice.logprobs.items():
                items = inside_list(value)
                so_far = self.lists.setdefault(key, [])
                if items:
                    so_far.append(items)
        if choice.text:
            self.text.append(choice.text)
        if choice.prompt_token_ids != NULL:
            self.prompt = choice.prompt_token_ids
        if choice.weight_versions:
            self.report = choice.weight_versions
        self.reason, self.last = choice.finish_reason, (event, choice.index)

    def news(self) -> tuple[int, str, dict[str, bytes]]:
        """What came since the last call."""
        news = {}
        for key, items in {**self.lists, "text": self.text}.items():
            before = self.told.get(key, 0)
            if len(items) > before:
                news[key] = b",".join(items[before:]) if key != "text" else "".join(items[before:]).encode()
                self.told[key] = len(items)
        return self.index, news

    def ended(self, ask: Ask) -> Ended:
        event, index = self.last
        for found in _all_of_choices(event).choices:
            if len(found) == 1 or decoded(found["index"]) == index:
                told = found
        scores = {key: Raw(b"[" + b",".join(items) + b"]") for key, items in self.lists.items()}
        ids = scores.pop("token_ids", None)
        if "text_offset" in scores and len(self.lists["tokens"]) > 1:
            names = decoded(scores["tokens"])
            scores["text_offset"] = list(accumulate(map(len, names[:-1]), initial=0))[: len(names)]
        told |= {"index": ask.first + self.index, "logprobs": scores or None}
        if "text" in told:
            told["text"] = "".join(self.text)
        told["token_ids"] = ids if ask.shows_ids and self.has_ids else None
        told["prompt_token_ids"] = self.prompt if ask.shows_ids else None
        for key in ("weight_versions", "finish_reason", "delta"):
            told.pop(key, None)
        unscored = num_unscored(scores, self.num_made) if scores else 0
        return Ended(self.index, self.num_made, unscored, self.reason, self.report, encoded(told)[:-1])


class Reader:
    def __init__(self, engine: str) -> None:
        self._connections = Connections(engine, {}, 4.0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[int, list[Whole]] = {}
        self.frames = None

    def received(self, ask: Ask, frames: Frames) -> None:
        self.frames = frames
        task = asyncio.get_running_loop().create_task(self._answer(ask, frames))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, ask: Ask, frames: Frames) -> None:
        try:
            async with self._connections.request(
                "POST", ask.path, data=ask.body, headers=_JSON, timeout_s=ask.timeout_s, connect_timeout_s=30.0
            ) as response:
                if ask.kind == "raw":
                    while block := await response.block():
                        frames.send(Frame(ask.number, [], b"", None, False, "", block))
                    frames.send(Frame(ask.number, [], b"", None, True, "", b""))
                    return
                if ask.kind == "samples":
                    await self._whole(ask, response, frames)
                    return
                await self._join(ask, response, frames)
        except Exception as error:
            frames.send(Frame(ask.number, [], b"", None, True, repr(error), b""))
            raise

    async def _whole(self, ask: Ask, response: Any, frames: Frames) -> None:
        wholes = self._open[ask.number] = [Whole(index) for index in range(ask.num_samples)]
        begun, head, usage = [], b"", None
        try:
            while block := await response.block():
                events = [block + await response.read()] if ask.is_whole else _completed(begun, block)
                for event in events:
                    if event == b"[DONE]":
                        continue
                    if not event.isascii():
                        event.decode()
                    chunk: Chunk = _chunk(event)
                    for choice in chunk.choices:
                        wholes[choice.index].add(choice, event)
                    if not head:
                        head = encoded({k: v for k, v in fields_of(event).items() if k not in _BESIDE_HEAD})
                    usage = chunk.usage or usage
        finally:
            del self._open[ask.number]
        ended = [whole.ended(ask) for whole in wholes]
        frames.send(Frame(ask.number, [], head, usage, True, "", b"", ended=ended))

    async def keep(self) -> None:
        """Tell each second what open samples have."""
        while True:
            await asyncio.sleep(_FRAME_S)
            news = {}
            for number, wholes in self._open.items():
                if told := [item for item in (whole.news() for whole in wholes) if item[1]]:
                    news[number] = msgspec.msgpack.encode(told)
            if news and self.frames:
                self.frames.send(Frame(0, [], b"", None, False, "", b"", kept=news))

    async def _join(self, ask: Ask, response: Any, frames: Frames) -> None:
        samples = [Joined(index) for index in range(ask.num_samples)]
        known = b""
        shows, begun, head, usage, sent = ask.kind == "events", [], b"", None, time.monotonic()
        while block := await response.block():
            events = [block + await response.read()] if ask.is_whole else _completed(begun, block)
            for event in events:
                if event == b"[DONE]":
                    continue
                if not event.isascii():
                    event.decode()
                chunk: Chunk = _chunk(event)
                for choice in chunk.choices:
                    samples[choice.index].add(choice, event)
                if not known:
                    known = head = encoded({k: v for k, v in fields_of(event).items() if k not in _BESIDE_HEAD})
                usage = chunk.usage or usage
                made = [sample.made(True) for sample in samples if sample.last is not None]
                frames.send(Frame(ask.number, made, head, chunk.usage, False, "", b""))
                head = b""
        made = [sample.made(True) for sample in samples if sample.last is not None]
        frames.send(Frame(ask.number, made, head, usage, True, "", b""))


async def _serve(engine: str, pipe: Connection) -> None:
    reader = Reader(engine)
    server = await asyncio.get_running_loop().create_server(lambda: Frames(Ask, reader.received), "127.0.0.1", 0)
    pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    keeping = asyncio.create_task(reader.keep())
    await until_closed(pipe)


def run(engine: str, pipe: Connection) -> None:
    uvloop.run(_serve(engine, pipe))
