"""An update that cuts off and a replica's death keep the tokens made so far: every dialect continues from them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from aiohttp import web

from engines.clients.sglang_engine import SglangEngine
from engines.engine import Engine
from engines.errors import DeadlineExceeded, EngineUnreachable, InvalidRequest
from gateway.dialects import rendering
from sim import server as sim_server
from sim.dialect import chat_ids
from sim.model import SimModel, detokenize, read, weights_key
from tests.rigs.rig import Json, Rig, SimReplica, StartRig

LENGTH = 100
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ASKED: Json = {"model": "sim", "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
async def slow_rig(start_rig: StartRig) -> Rig:
    """Two replicas, which need a second for a completion."""
    return await start_rig(2, sim={"decode_step_s": 0.01})


async def kill_loaded(rig: Rig) -> SimReplica:
    """Kill a replica that has samples in flight."""
    loaded = next(replica.replica_id for replica in rig.fleet.replicas if replica.load_samples)
    dead = next(replica for replica in rig.replicas if replica.info.replica_id == loaded)
    await dead.kill()
    return dead


async def events(rig: Rig, path: str, body: Json) -> list[Json]:
    async with rig.client.post(rig.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content]
    data = [line[6:] for line in lines if line.startswith(b"data: ")]
    assert data[-1].strip() == b"[DONE]"
    return [orjson.loads(line) for line in data[:-1]]


@dataclass
class Sample:
    """What a client was told of a sample, whole or in chunks, of any dialect."""

    ids: list[int]
    text: str | None
    logprobs: list[float]
    ends: list[str]
    spans: list[tuple[int, int, int]]
    last: Json = field(compare=False)


def sample_of(choices: list[Json]) -> Sample:
    last = choices[-1]
    said = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    text = "".join(one.get("text") or one.get("content") or "" for one in said)
    scores = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return Sample(
        ids=[token_id for choice in choices for token_id in choice.get("token_ids") or ()],
        text=text if "text" in said[-1] or "content" in said[0] else None,
        logprobs=[
            one["logprob"] if "content" in score else one
            for score in scores
            for one in score.get("content", score.get("token_logprobs"))
        ],
        ends=[reason for choice in choices if (reason := choice["finish_reason"])],
        spans=[(int(one["version"]), one["start"], one["end"]) for one in last["weight_versions"]],
        last=last,
    )


def as_choice(told: Json) -> Json:
    """A reply of SGLang's dialect in the words of the others."""
    meta = told["meta_info"]
    scores = {"token_logprobs": [entry[0] for entry in meta["output_token_logprobs"]]}
    return meta | told | {
        "index": 0, "token_ids": told["output_ids"], "logprobs": scores, "finish_reason": meta["finish_reason"]["type"],
    }  # fmt: skip


async def told_of(rig: Rig, path: str, body: Json, *, stream: bool) -> tuple[list[Sample], int]:
    """The samples in their order, and the count of their tokens."""
    if path == "/generate":
        reply = (await events(rig, path, body))[-1] if stream else (await rig.post(path, body))[1]
        return [sample_of([as_choice(reply)])], reply["meta_info"]["completion_tokens"]
    if stream:
        *chunks, last = await events(rig, path, body | {"stream_options": {"include_usage": True}})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        status, last = await rig.post(path, body)
        assert status == 200, last
        choices = last["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
    indices = sorted({choice["index"] for choice in choices})
    samples = [sample_of([choice for choice in choices if choice["index"] == index]) for index in indices]
    return samples, last["usage"]["completion_tokens"]


LONG = 80
GREEDY: Json = {"max_tokens": LONG, "ignore_eos": True, "temperature": 0.0}
DIALECTS: dict[str, Json] = {
    "/v1/completions": {"prompt": [5, 6], "logprobs": 1, "return_token_ids": True} | GREEDY,
    CHAT: {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "return_token_ids": True} | GREEDY,
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": GREEDY | {"logprobs": 0}},
    "/generate": {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 0.0},
        "return_logprob": True,
    },
}


def with_samples(body: Json, n: int) -> Json:
    drawn: Json = {"n": n, "temperature": 1.0 if n > 1 else 0.0}
    return body | ({"sampling_params": body["sampling_params"] | drawn} if "sampling_params" in body else drawn)


@pytest.mark.parametrize("breaks", ["update", "update update", "death", "death death", "update death"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "n"), [(path, n) for path in DIALECTS for n in (1, 3) if path != "/generate" or n == 1]
)
async def test_each_sample_goes_on_from_its_tokens(
    start_rig: StartRig, path: str, n: int, stream: bool, breaks: str
) -> None:
    """Each token and log-prob is made again from the weights that its span names."""
    rig = await start_rig(3, weights={"in_flight": "abort"})
    await rig.open_group()
    before = sum(replica.generated_tokens for replica in rig.replicas)
    running = asyncio.create_task(told_of(rig, path, with_samples(DIALECTS[path], n), stream=stream))
    for end in breaks.split():
        await rig.begun(n, tokens=9)
        await (rig.update() if end == "update" else kill_loaded(rig))
    rig.hurry()
    samples, counted = await running
    updates = breaks.count("update")
    prompt = chat_ids(HELLO) if path == CHAT else [5, 6]
    model = SimModel.of(rig.sim)
    assert (len(samples), counted) == (n, n * LONG)
    assert len({tuple(sample.ids) for sample in samples}) == n
    for sample in samples:
        starts, ends = [0, *(end for _, _, end in sample.spans[:-1])], [end for _, _, end in sample.spans]
        assert sample.spans == list(zip(range(updates + 1), starts, ends, strict=True))
        assert (ends[-1], len(sample.ids), sample.ends) == (LONG, LONG, ["length"])
        assert sample.last.get("kv_versions", [updates]) == [updates]
        versions = [str(version or "default") for version, start, end in sample.spans for _ in range(start, end)]
        if n == 1:
            assert sample.ids == model.complete(prompt, versions=versions, max_tokens=LONG, ignore_eos=True)
        context = read(prompt)
        for place, token_id in enumerate(sample.ids):
            expected = model.logprob(context, token_id, weights_key(versions[place]))
            assert sample.logprobs[place] == pytest.approx(expected), place
            context = read([token_id], context)
        assert sample.text in (None, detokenize(sample.ids))
    if not updates:
        made = sum(replica.generated_tokens for replica in rig.replicas) - before
        assert made <= n * (LONG + 4 * len(breaks.split())), "a chunk has 4 tokens"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        (CHAT, {"messages": HELLO}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7]}),
    ],
)
async def test_samples_of_a_seeded_group_stay_different_draws(slow_rig: Rig, path: str, asked: Json) -> None:
    """The engine runs 8 samples of 16 at once: the others have no token yet, and are made as without the death."""
    sampling = {"n": 16, "seed": 7, "temperature": 1.0, "max_tokens": 80, "ignore_eos": True}
    body = asked | {"model": "sim", "return_token_ids": True}
    body |= {"sampling_params": sampling} if "token_ids" in asked else sampling
    task = asyncio.create_task(slow_rig.post(path, body))
    await slow_rig.begun(8)
    await kill_loaded(slow_rig)
    slow_rig.hurry()
    status, reply = await task
    assert status == 200, reply
    _, undisturbed = await slow_rig.post(path, body)
    made = [choice["token_ids"] for choice in reply["choices"]]
    assert made[8:] == [choice["token_ids"] for choice in undisturbed["choices"]][8:]
    assert len({tuple(tokens) for tokens in made}) == 16


class BreakingEngine:
    """An engine whose streams break before the usage."""

    reply, events = Engine.reply, Engine.events

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def stream(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
        body = body | {"stream_options": {"include_usage": True}}
        async with aclosing(self._engine.stream(path, body, timeout_s)) as chunks:
            async for chunk in chunks:
                if not chunk["choices"]:
                    raise EngineUnreachable("the connection broke", replica_id=self._engine.replica_id)
                yield chunk


class EndlessEngine(BreakingEngine):
    """An engine whose streams break between the last token and the end of their first sample."""

    async def stream(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
        async with aclosing(self._engine.stream(path, body, timeout_s)) as chunks:
            async for chunk in chunks:
                ended = [choice for choice in chunk["choices"] if choice["finish_reason"] is not None]
                for choice in ended:
                    choice |= {"finish_reason": None, "weight_versions": None}
                yield chunk
                if ended:
                    raise EngineUnreachable("the connection broke", replica_id=self._engine.replica_id)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("breaking", [BreakingEngine, EndlessEngine])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/inference/v1/generate"])
async def test_a_death_after_the_last_token_takes_nothing_but_the_engines_count(
    rig: Rig, path: str, breaking: type[BreakingEngine], stream: bool
) -> None:
    undisturbed = await told_of(rig, path, DIALECTS[path], stream=stream)
    for replica in rig.fleet.replicas:
        replica.engine = breaking(replica.engine)  # type: ignore[assignment]  # all but its streams is the same
    told = await told_of(rig, path, DIALECTS[path], stream=stream)
    assert told == undisturbed
    ((sample,), _), ((expected,), _) = told, undisturbed
    for name in ("stop_reason", "kv_versions"):
        assert sample.last.get(name) == expected.last.get(name), name


class DyingSglang:
    """A server that breaks off each stream after two chunks of a token each, which do not repeat their sample."""

    TOKENS = (41, 42)

    def __init__(self) -> None:
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app)

    async def start(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"incremental_streaming_output": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"error": {"message": "keys in [0, 999]"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for made, token in enumerate(self.TOKENS, 1):
            meta: Json = {"id": "a", "finish_reason": None, "prompt_tokens": 3, "completion_tokens": made}
            meta["output_token_logprobs"] = [[-0.5, token, None]]
            event = {"text": detokenize([token]), "output_ids": [token], "meta_info": meta}
            await response.write(b"data: %b\n\n" % orjson.dumps(event | {"prompt_token_ids": body["input_ids"]}))
        assert request.transport is not None
        request.transport.close()
        return response


async def kept_tokens(rig: Rig) -> float:
    async with rig.client.get(rig.url + "/metrics") as page:
        lines = (await page.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("rollout_gateway_kept_tokens_total"))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_tokens_of_an_sglang_that_dies_are_kept(rig: Rig, is_stream: bool) -> None:
    dying = DyingSglang()
    replica = rig.fleet.replicas[0]
    replica.engine = SglangEngine(replica.replica_id, await dying.start())
    body = ASKED | {"prompt": [[5, 6, 7]], "logprobs": 0, "return_token_ids": True}
    kept = 0.0
    async with asyncio.timeout(20):
        while not kept:  # until the replica gets a request
            if is_stream:
                choices = [
                    choice for chunk in await events(rig, "/v1/completions", body) for choice in chunk["choices"]
                ]
            else:
                status, reply = await rig.post("/v1/completions", body)
                assert status == 200, reply
                choices = reply["choices"]
            kept = await kept_tokens(rig)
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert (token_ids[:2], len(token_ids), kept) == ([41, 42], LENGTH, 2)
    assert [reason for choice in choices if (reason := choice["finish_reason"])] == ["length"]
    assert sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices) == LENGTH
    await replica.engine.close()
    await dying.stop()


async def test_streams_of_all_prompts_continue_after_a_death(slow_rig: Rig) -> None:
    body = ASKED | {"prompt": [[5, 6], [7, 8], [9, 10], [11, 12]], "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}}
    _, undisturbed = await slow_rig.post("/v1/completions", {k: v for k, v in body.items() if k != "stream_options"})
    task = asyncio.create_task(events(slow_rig, "/v1/completions", body))
    await slow_rig.begun(4)
    await slow_rig.replicas[0].kill()
    slow_rig.hurry()
    chunks = await task
    assert not [chunk for chunk in chunks if "error" in chunk]
    for index, expected in enumerate(undisturbed["choices"]):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [i for choice in choices for i in choice["token_ids"] or ()] == expected["token_ids"]
        assert "".join(choice["text"] for choice in choices) == expected["text"]
        assert choices[-1]["finish_reason"] == "length"
        assert choices[-1]["weight_versions"] == [{"version": 0, "start": 0, "end": LENGTH}]
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * LENGTH


@pytest.mark.parametrize("streams", [False, True])
async def test_a_conversation_whose_only_replica_dies_continues_on_its_successor(
    start_rig: StartRig, streams: bool
) -> None:
    rig = await start_rig(1)
    body = ASKED | {"messages": HELLO, "max_tokens": 80, "return_token_ids": True}
    _, undisturbed = await rig.post(CHAT, body)

    async def text() -> str:
        if not streams:
            return str((await rig.post(CHAT, body))[1]["choices"][0]["message"]["content"])
        deltas = [choice["delta"] for chunk in await events(rig, CHAT, body) for choice in chunk["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    task = asyncio.create_task(text())
    await rig.begun(tokens=40)
    await kill_loaded(rig)
    await rig.until({})
    successor = await rig.add_replica("engine-0")
    successor.hurry()
    async with asyncio.timeout(20):
        assert await task == undisturbed["choices"][0]["message"]["content"]
    assert successor.generated_tokens <= 80 - 32


async def test_a_replica_that_does_not_parse_in_time_is_passed_over_and_then_tried_last(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = rig.fleet.replicas[0].engine
    asked = []

    async def late(method: str, path: str, *_: Any) -> Json:
        asked.append(path)
        raise DeadlineExceeded(f"no answer to {path}")

    monkeypatch.setattr(silent, "ask", late)
    replies = [await rig.post(CHAT, ASKED | {"messages": HELLO, "max_tokens": 80}) for _ in range(4)]
    assert [status for status, _ in replies] == [200] * 4
    assert len(asked) <= 1


async def test_a_conversation_leaves_a_replica_that_is_lost_before_it_parses(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "_ASK_TIMEOUT_S", 600.0)
    for replica in rig.replicas:
        replica.inject(held=rendering.DERENDER)
    task = asyncio.create_task(rig.post(CHAT, ASKED | {"messages": HELLO, "max_tokens": 80}))
    async with asyncio.timeout(20):
        while not (asked := [replica for replica in rig.replicas if replica.num_held]):
            await asyncio.sleep(0.01)
        (other,) = (replica for replica in rig.replicas if replica is not asked[0])
        other.inject()
        next(one for one in rig.fleet.replicas if one.replica_id == asked[0].info.replica_id).drop_calls()
        status, _ = await task
    assert status == 200


async def test_where_no_engine_words_its_tokens_a_conversation_is_read_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Json:
        raise InvalidRequest("no")

    monkeypatch.setattr(sim_server, "derendered", refused)
    status, reply = await rig.post(CHAT, ASKED | {"messages": HELLO, "max_tokens": 80, "return_token_ids": True})
    (told,) = reply["choices"]
    assert (status, told["message"]["content"]) == (200, detokenize(told["token_ids"]))
