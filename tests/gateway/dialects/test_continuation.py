"""An update that cuts off and a replica's death keep the tokens made so far: every dialect continues from them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.errors import InvalidRequest
from gateway.dialects import rendering
from sim import server as sim_server
from sim.dialect import chat_ids
from sim.model import SimModel, detokenize, read, weights_key
from tests.rigs.calls import until
from tests.rigs.rig import Json, Rig, StartRig

LENGTH = 100
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ASKED: Json = {"model": "sim", "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
async def slow_rig(start_rig: StartRig) -> Rig:
    """Two replicas, which need a second for a completion."""
    return await start_rig(2, sim={"decode_step_s": 0.01})


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


async def told_of(rig: Rig, path: str, body: Json, *, stream: bool) -> tuple[list[Sample], int]:
    """The samples in their order, and the count of their tokens."""
    if stream:
        *chunks, last = await rig.stream(path, body | {"stream_options": {"include_usage": True}})
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
}


def with_samples(body: Json, n: int) -> Json:
    drawn: Json = {"n": n, "temperature": 1.0 if n > 1 else 0.0}
    return body | ({"sampling_params": body["sampling_params"] | drawn} if "sampling_params" in body else drawn)


@pytest.mark.parametrize("breaks", ["update", "death", "death death", "update death"])
@pytest.mark.parametrize(
    ("path", "n", "stream"),
    [(path, n, stream) for path in DIALECTS for n in (1, 3) for stream in (False, True) if path != CHAT or not stream],
)
async def test_each_sample_goes_on_from_its_tokens(
    start_rig: StartRig, path: str, n: int, stream: bool, breaks: str
) -> None:
    """Each token and log-prob is made again from the weights that its span names."""
    rig = await start_rig(3, weights={"in_flight": "recompute"})
    await rig.open_group()
    before = sum(replica.generated_tokens for replica in rig.replicas)
    running = asyncio.create_task(told_of(rig, path, with_samples(DIALECTS[path], n), stream=stream))
    for end in breaks.split():
        await rig.begun(n, tokens=9)
        await (rig.update() if end == "update" else rig.kill_loaded())
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
    await slow_rig.kill_loaded()
    slow_rig.hurry()
    status, reply = await task
    assert status == 200, reply
    _, undisturbed = await slow_rig.post(path, body)
    made = [choice["token_ids"] for choice in reply["choices"]]
    assert made[8:] == [choice["token_ids"] for choice in undisturbed["choices"]][8:]
    assert len({tuple(tokens) for tokens in made}) == 16


async def test_a_conversation_whose_only_replica_dies_continues_on_its_successor(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    body = ASKED | {"messages": HELLO, "max_tokens": 80, "return_token_ids": True}
    _, undisturbed = await rig.post(CHAT, body)
    task = asyncio.create_task(rig.post(CHAT, body))
    await rig.begun(tokens=40)
    await rig.kill_loaded()
    await rig.until({})
    successor = await rig.add_replica("engine-0")
    successor.hurry()
    async with asyncio.timeout(20):
        _, reply = await task
    assert reply["choices"][0]["message"] == undisturbed["choices"][0]["message"]
    assert successor.generated_tokens <= 80 - 32


async def test_a_conversation_leaves_a_replica_that_is_lost_before_it_parses(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "_ASK_TIMEOUT_S", 600.0)
    for replica in rig.replicas:
        replica.inject(held=rendering.DERENDER)
    task = asyncio.create_task(rig.post(CHAT, ASKED | {"messages": HELLO, "max_tokens": 80}))
    await until(lambda: any(replica.num_held for replica in rig.replicas))
    asked, other = sorted(rig.replicas, key=lambda replica: -replica.num_held)
    other.inject()
    next(one for one in rig.fleet.replicas if one.replica_id == asked.info.replica_id).drop_calls()
    async with asyncio.timeout(20):
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
