"""The life of a rollout under random ends of its attempts: no token is lost, doubled or made up, and it ends once."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.engine import Engine, Json
from engines.errors import (
    DeadlyPrompt,
    EngineError,
    EngineFailed,
    EngineRefused,
    EngineUnreachable,
    RolloutGatewayError,
)
from engines.raw_json import opened
from engines.reading.link import Link
from engines.reading.server import ReaderServer
from gateway.config.schema import GatewayConfig
from gateway.dialects.completions import CompletionPrompt, Completions
from gateway.dialects.runner import Runner
from gateway.dialects.streams import blocks_of
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement import scheduler
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from gateway.fleet.watch import evidence
from tests.rigs.stories.played_fleet import DIED, PlayedFleet

PROMPT = [7, 8, 9]
FIRST = 1000  # the first token of sample i is FIRST + i, so that samples differ
MAX_ATTEMPTS = 3
KEY = "a key"
ENDS = ("breaks", "unfinished", "stops", "dies", "fails", "busy", "refuses")


@dataclass(frozen=True)
class Ending:
    """How an attempt ends that does not deliver, and after how many tokens of each sample; "unfinished" is a break
    between the last token and the end, "stops" the end of a stream, as a whole one ends."""

    end: str
    after: int


@dataclass
class World:
    """Engines that make the same tokens and share a script of ends; without an ending left they deliver."""

    endings: list[Ending]
    chunk: int
    attempts: int = 0
    makers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def next_ending(self) -> Ending | None:
        self.attempts += 1
        return self.endings.pop(0) if self.endings else None


def next_token(read: tuple[int, ...]) -> int:
    """The only token that may follow these."""
    return zlib.crc32(repr(read).encode()) % 900 + 20


def sample(index: int, length: int) -> list[int]:
    """Sample `index`, undisturbed."""
    made = (*PROMPT, FIRST + index)
    while len(made) < len(PROMPT) + length:
        made = (*made, next_token(made))
    return list(made[len(PROMPT) :])


def name(token_id: int) -> str:
    return chr(0x4E00 + token_id)


class PlayedEngine:
    """Makes the tokens of `sample` as vLLM reports them, up to the ending that the world has for this attempt."""

    reply = Engine.reply
    replica_id = "engine"
    beside: Link

    def __init__(self, world: World) -> None:
        self._world = world
        self.replica: Replica

    async def close(self) -> None:
        pass

    async def ask(self, method: str, path: str, body: Json, timeout_s: float) -> Json:
        assert path == "/detokenize"
        return {"prompt": "".join(map(name, body["tokens"]))}

    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        whole: dict[int, Json] = {}
        async for chunk in self._chunks(body):
            for choice in chunk["choices"]:
                whole[choice["index"]] = _joined(whole.get(choice["index"]), choice)
        made = sum(len(choice["token_ids"]) for choice in whole.values())
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made}
        return {"choices": [whole[index] for index in sorted(whole)], "usage": usage}

    async def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        async for chunk in self._chunks(body):
            yield [orjson.dumps(chunk)]

    async def _chunks(self, body: Json) -> AsyncGenerator[Json]:
        ending, n = self._world.next_ending(), body.get("n", 1)
        if ending is not None and (error := self._early(ending)):
            raise error
        read, made = tuple(body["prompt"]), 0
        texts = [read for _ in range(n)]
        is_all = ending is None or ending.end == "unfinished"
        limit = body["max_tokens"] if ending is None or is_all else min(ending.after, body["max_tokens"])
        while made < limit:
            count = min(self._world.chunk, limit - made)
            for index in range(n):
                texts[index] = self._made(texts[index], index, count)
            made += count
            has_ended = made == body["max_tokens"] and (ending is None or not is_all)
            for index in range(n):
                yield {"choices": [_choice(index, read, texts[index][-count:], made == count, has_ended)]}
            if has_ended:
                yield {"choices": [], "usage": {"prompt_tokens": len(read), "completion_tokens": n * made}}
                return
        assert ending is not None
        if ending.end == "stops" and made:
            return
        raise EngineUnreachable(DIED if ending.end == "dies" else "the connection broke")

    def _early(self, ending: Ending) -> EngineError | None:
        if ending.end == "refuses":
            return EngineRefused("wrong", status=400, body={})
        if ending.end == "fails":
            return EngineFailed("500")
        if ending.end == "busy":
            error = EngineRefused("no room", status=429, body={})
            error.retry_after_s = 0.0
            return error
        return None

    def _made(self, text: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
        for _ in range(count):
            token_id = FIRST + index if len(text) == len(PROMPT) else next_token(text)
            text = (*text, token_id)
            assert self.replica.weight_version is not None
            self._world.makers[text] = self.replica.weight_version
        return text


def _choice(index: int, read: tuple[int, ...], ids: tuple[int, ...], is_first: bool, has_ended: bool) -> Json:
    names = [name(token_id) for token_id in ids]
    logprobs = {
        "token_logprobs": [-token_id / 1000 for token_id in ids], "tokens": names,
        "top_logprobs": [None] * len(ids), "text_offset": list(range(len(ids))),
    }  # fmt: skip
    return {
        "index": index, "text": "".join(names), "token_ids": list(ids), "logprobs": logprobs,
        "prompt_token_ids": list(read) if is_first else None, "stop_reason": None,
        "finish_reason": "length" if has_ended else None,
    }  # fmt: skip


def _joined(before: Json | None, choice: Json) -> Json:
    if before is None:
        return choice
    more = choice["logprobs"] or {}  # none with an end alone
    logprobs = {key: scores + more.get(key, []) for key, scores in before["logprobs"].items()}
    both = {key: before[key] + choice[key] for key in ("text", "token_ids")}
    return choice | both | {"logprobs": logprobs, "prompt_token_ids": before["prompt_token_ids"]}


@contextmanager
def without_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "_FIRST_PAUSE_S", 0.0)
        patch.setattr(scheduler, "_AFTER_DEATH_S", 0.0)
        yield


def life(world: World, n: int, length: int, *, is_stream: bool) -> dict[int, Json]:
    """The samples that the client gets, by index."""
    with without_pauses():
        return asyncio.run(_life(world, n, length, is_stream=is_stream))


def end_of_life(world: World, n: int, length: int, *, is_stream: bool) -> dict[int, Json] | RolloutGatewayError:
    """The samples that the client gets, or its error."""
    try:
        return life(world, n, length, is_stream=is_stream)
    except RolloutGatewayError as error:
        return error


async def _life(world: World, n: int, length: int, *, is_stream: bool) -> dict[int, Json]:
    engines = [PlayedEngine(world) for _ in range(3)]
    readers = [ReaderServer(cast(Engine, engine), KEY) for engine in engines]
    for engine, reader in zip(engines, readers, strict=True):
        engine.beside = Link("engine", await reader.open("127.0.0.1"), KEY)
    fleet = PlayedFleet([cast(Engine, engine) for engine in engines], places=64)
    for engine, replica in zip(engines, fleet.replicas, strict=True):
        engine.replica = replica
    config = GatewayConfig(max_attempts=MAX_ATTEMPTS)
    metrics = Metrics()
    runner = Runner(config, Scheduler(config, cast(Fleet, fleet), metrics), cast(Fleet, fleet), metrics)
    rollout = Rollout(request_id="a-0", request="a", model="m", n=n, tokens=n * length)
    body = {"prompt": PROMPT, "n": n, "max_tokens": length, "logprobs": 0, "return_token_ids": True, "stream": False}
    prompt = CompletionPrompt(request_id="a", index=0, rollout=rollout, body=body, limit=length, read=PROMPT)
    completions = Completions(cast(Fleet, fleet), runner)
    told: dict[int, Json] = {}
    try:
        async with asyncio.timeout(60):
            if is_stream:
                async for chunks in blocks_of(partial(completions.stream, [prompt], [])):
                    for choice in opened([choice for chunk in chunks for choice in chunk["choices"]]):
                        before = told.get(choice["index"])
                        assert before is None or before["finish_reason"] is None, "a sample has ended once"
                        told[choice["index"]] = _joined(before, choice)
            else:
                reply = await completions.generate([prompt])
                assert [choice["index"] for choice in reply["choices"]] == list(range(n))
                assert reply["usage"]["completion_tokens"] == n * length
                told = {choice["index"]: choice for choice in reply["choices"]}
    finally:
        for engine, reader in zip(engines, readers, strict=True):
            await engine.beside.close()
            await reader.close()
        assert [replica.load_samples for replica in fleet.replicas] == [0, 0, 0]
        assert [replica.load_tokens for replica in fleet.replicas] == [0, 0, 0]
    return told


endings = st.lists(st.builds(Ending, st.sampled_from(ENDS[:-1]), st.integers(0, 40)), max_size=8)


@settings(max_examples=150, database=None)
@given(endings, st.integers(1, 3), st.sampled_from([5, 40, 70, 100]), st.sampled_from([1, 4, 16]), st.booleans())
def test_what_is_delivered_is_what_would_have_been_without_the_ends(
    script: list[Ending], n: int, length: int, chunk: int, is_stream: bool
) -> None:
    world = World(list(script), chunk)
    told = end_of_life(world, n, length, is_stream=is_stream)
    if isinstance(told, DeadlyPrompt):
        assert sum(one.end == "dies" for one in script) >= 2
        return
    if isinstance(told, EngineError):  # only the bound of attempts in a row without a new token ends it
        assert sum(one.end != "busy" for one in script) >= MAX_ATTEMPTS
        assert "gateway.max_attempts" in str(told)
        return
    assert isinstance(told, dict)
    assert told.keys() == set(range(n))
    for index, choice in told.items():
        expected = sample(index, length)
        assert (choice["token_ids"], choice["finish_reason"]) == (expected, "length")
        assert choice["text"] == "".join(map(name, expected))
        assert choice["logprobs"]["tokens"] == [name(token_id) for token_id in expected]
        assert choice["logprobs"]["token_logprobs"] == [-token_id / 1000 for token_id in expected]
        check_spans(world, choice["weight_versions"], expected)


def check_spans(world: World, spans: list[Json], made: list[int]) -> None:
    """The spans cover the tokens without gap or overlap, and name the version that made each of them."""
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == len(made)
    versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    makers = [world.makers[(*PROMPT, *made[: place + 1])] for place in range(len(made))]
    assert versions == makers


@settings(max_examples=50, database=None)
@given(st.integers(1, 60), st.integers(1, MAX_ATTEMPTS - 1), st.booleans())
def test_a_rest_that_an_engine_refuses_continues_on_another(after: int, refusals: int, is_stream: bool) -> None:
    world = World([Ending("breaks", after), *[Ending("refuses", 0)] * refusals], after)
    told = life(world, 1, 70, is_stream=is_stream)
    assert told[0]["token_ids"] == sample(0, 70)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_rest_that_all_engines_refuse_is_their_failure(is_stream: bool) -> None:
    world = World([Ending("breaks", 4), *[Ending("refuses", 0)] * MAX_ATTEMPTS], 4)
    told = end_of_life(world, 1, 70, is_stream=is_stream)
    assert isinstance(told, EngineFailed)
    assert "wrong (after 3 attempts" in str(told)


@settings(max_examples=50, database=None)
@given(st.sampled_from(["breaks", "dies", "fails"]), st.integers(1, 3), st.booleans())
def test_attempts_without_a_token_are_bounded(end: str, n: int, is_stream: bool) -> None:
    world = World([Ending(end, 0)] * 50, 4)
    with pytest.raises((EngineError, DeadlyPrompt)):
        life(world, n, 70, is_stream=is_stream)
    assert world.attempts == (2 if end == "dies" else MAX_ATTEMPTS)


@settings(max_examples=50, database=None)
@given(st.integers(1, 3), st.integers(1, 60), st.booleans())
def test_attempts_that_add_tokens_are_not_counted(n: int, after: int, is_stream: bool) -> None:
    length = 70
    world = World([Ending("breaks", after)] * 200, after)
    told = life(world, n, length, is_stream=is_stream)
    assert all(choice["token_ids"] == sample(index, length) for index, choice in told.items())
    breaks = -(-length // after) - 1
    assert world.attempts <= 1 + n * (breaks + 1)
