"""Which weights are told of an engine that tells none itself, and whose tokens come long after they were made."""

import asyncio
import math
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, cast

import orjson
import pytest

from engines.chunks import Chunk
from engines.engine import Engine, Json
from engines.raw_json import encoded
from gateway.dialects.sample import Sample, Source
from gateway.fleet.replica import Flight, Replica
from sim.model import SimModel
from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig

ASKED = {"max_tokens": 12, "ignore_eos": True}
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": [5, 6], "return_token_ids": True, **ASKED},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **ASKED},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": ASKED},
}


def may_be_of(*versions: int) -> list[Json]:
    return [{"version": version, "start": None, "end": None} for version in versions]


def made_in(flight: Flight) -> Source:
    return Source(cast(Replica, None), flight, None)


def added(sample: Sample, told: Json) -> None:
    """Have the sample take a choice of an engine."""
    sample.add(*Chunk.read(encoded({"choices": [told]})).choices)


def stamped(flight: Flight, **told: Any) -> list[Json]:
    sample = Sample(0)
    sample.begin(made_in(flight))
    added(sample, {"index": 0, "token_ids": [7, 8, 9], **told})
    sample.stamp()
    return list(sample.spans or ())


def flight(*versions: int, keeps_kv: bool = True) -> Flight:
    """One that was sent under the first and has met the others."""
    begun = Flight(versions[0])
    for version in versions[1:]:
        begun.meet(version, keeps_kv=keeps_kv)
    return begun


def test_a_reply_that_met_one_version_is_of_it() -> None:
    assert stamped(flight(4)) == [{"version": 4, "start": 0, "end": 3}]


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_a_reply_that_met_more_may_be_of_each_of_them_and_none_is_left_out(keeps_kv: bool) -> None:
    assert stamped(flight(4, 5, 7, keeps_kv=keeps_kv)) == may_be_of(4, 5, 7)


def test_what_was_sent_under_an_update_is_of_what_the_update_brought() -> None:
    begun = Flight(None)
    begun.meet(1, keeps_kv=True)
    assert stamped(begun) == [{"version": 1, "start": 0, "end": 3}]


def test_what_the_engine_tells_itself_goes_before() -> None:
    own = [{"version": "4", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    assert [span["version"] for span in stamped(flight(4, 5, 7), weight_versions=own)] == [4, 7]


class LateEngine:
    """Stands before a replica's engine: tells no spans, and nothing that it has made until `tell` is set.

    The canary is answered at once.
    """

    def __init__(self, engine: Engine) -> None:
        self.tell = asyncio.Event()
        self._withheld = 0
        self._generate, self._events = engine.generate, engine.events
        engine.generate = self.generate  # type: ignore[method-assign]
        engine.events = self.events  # type: ignore[method-assign]
        engine.reply = partial(Engine.reply, self)  # type: ignore[method-assign, arg-type]

    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        answer = await self._generate(path, body, timeout_s)
        if not str(body.get("cache_salt")).startswith("canary-"):
            await self._late(answer)
        return answer

    async def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        async for events in self._events(path, body, timeout_s):
            for chunk in map(orjson.loads, events):
                await self._late(chunk)
                yield [orjson.dumps(chunk)]

    async def _late(self, told: Json) -> None:
        for choice in told["choices"]:
            choice.pop("weight_versions", None)
        self._withheld += 1
        await asyncio.wait_for(self.tell.wait(), 20)

    async def until_withheld(self, answers: int) -> None:
        await until(lambda: self._withheld >= answers)


async def asked(rig: Rig, path: str, *, stream: bool, **fields: Any) -> list[Json]:
    """The spans of the one sample."""
    body = BODIES[path] | fields
    if not stream:
        status, reply = await rig.post(path, body)
        assert status == 200, reply
        return spans(reply)
    return spans((await rig.stream(path, body))[-1])


def spans(told: Json) -> list[Json]:
    found = told["choices"][0]["weight_versions"]
    return [{**span, "version": int(span["version"])} for span in found]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("updates", [1, 2])
async def test_tokens_that_arrive_after_updates_may_be_of_every_version_since_the_request(
    start_rig: StartRig, stream: bool, updates: int
) -> None:
    rig = await start_rig(1)
    await rig.open_group()
    late = LateEngine(rig.readers["engine-0"].engine)
    running = [asyncio.create_task(asked(rig, path, stream=stream)) for path in BODIES]
    await late.until_withheld(len(BODIES))
    for _ in range(updates):
        await rig.update()
    assert not any(task.done() for task in running)
    late.tell.set()
    assert [await task for task in running] == [may_be_of(*range(updates + 1))] * len(BODIES)
    after = await asked(rig, "/v1/completions", stream=stream)
    assert after == [{"version": updates, "start": 0, "end": 12}], "what is sent after them is of the last alone"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [1, 2])
async def test_tokens_without_a_log_prob_are_null_marked_and_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, n: int, stream: bool
) -> None:
    monkeypatch.setattr(SimModel, "logprob", lambda *_: math.nan)
    path, body = "/v1/completions", BODIES["/v1/completions"] | {"n": n, "temperature": 1.0, "logprobs": 0}
    replies = await rig.stream(path, body) if stream else [(await rig.post(path, body))[1]]
    choices = [choice for reply in replies for choice in reply["choices"]]
    ended = [choice for choice in choices if choice["finish_reason"]]
    assert [choice["missing_logprobs"] for choice in ended] == [12] * n
    assert {score for choice in choices for score in choice["logprobs"]["token_logprobs"]} == {None}
    metrics = await (await rig.client.get(f"{rig.url}/metrics")).text()
    assert f"rollout_gateway_missing_logprobs_total {12 * n}.0" in metrics
