"""Clients that are slow, careless or hostile get an error in JSON and harm nobody else."""

import asyncio
import gzip
from typing import Any

import pytest

from gateway.dialects import completions
from gateway.http.supervisor import Supervisor
from tests.rigs.calls import until
from tests.rigs.rig import FAST_WATCH, Json, Rig, StartRig

ASKED: Json = {"model": "sim", "prompt": [[5, 6]], "max_tokens": 4}


async def test_an_error_that_nobody_foresaw_is_json(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.http.routes.rollouts.session_of", broken)
    status, reply = await rig.post("/v1/completions", ASKED)
    assert (status, reply["error"]["code"]) == (500, 500)


async def test_a_body_that_inflates_beyond_the_limit_is_refused(rig: Rig) -> None:
    body = gzip.compress(b" " * (65 << 20))
    assert len(body) < 100_000
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with rig.client.post(f"{rig.url}/v1/completions", data=body, headers=headers) as response:
        assert response.status == 413
        assert "error" in await response.json()


async def test_more_prompts_than_allowed_are_refused_at_once(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_PROMPTS", 10)
    rig = await start_rig(1)
    status, reply = await rig.post("/v1/completions", ASKED | {"prompt": ["a"] * 11})
    assert (status, reply["error"]["param"]) == (400, "prompt")
    assert "11 prompts, more than 10" in reply["error"]["message"]
    assert (await rig.post("/v1/completions", ASKED | {"prompt": [5] * 11}))[0] == 200  # one prompt of 11 tokens


async def test_a_pause_leaves_the_gate_open_where_a_replica_fails_under_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        await rig.replicas[0].kill()
        raise ConnectionResetError

    engine = rig.fleet.replicas[0].engine
    monkeypatch.setattr(engine, "pause", broken)
    assert (await rig.post("/pause?mode=abort"))[0] != 200
    await until(lambda: rig.get("/status"), lambda got: not got[1]["gate_closed_for"])
    assert (await rig.complete([[5]]))["choices"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "sim", "prompt": [5], "max_tokens": 100, "ignore_eos": True}),
        ("/v1/chat/completions", {"messages": [{"content": "a"}], "max_tokens": 100, "ignore_eos": True}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 100, "ignore_eos": True}}),
    ],
)
async def test_a_client_that_leaves_its_stream_ends_its_rollout(start_rig: StartRig, path: str, body: Any) -> None:
    rig = await start_rig(1, sim={"decode_step_s": 0.01}, fleet=FAST_WATCH | {"stalled_after_s": 600.0})
    begun = asyncio.create_task(rig.begun())
    async with rig.client.post(rig.url + path, json=body | {"stream": True}) as response:
        await begun
        response.close()
    async with asyncio.timeout(20):
        await rig.fleet.replicas[0].idle.wait()


async def test_a_background_task_that_ends_fails_the_health_check() -> None:
    supervisor = Supervisor()

    async def ends() -> None:
        raise OSError("disk")

    supervisor.start("watch something", ends())
    async with asyncio.timeout(30):
        while not supervisor.failure:
            await asyncio.sleep(0)
    assert supervisor.failure == "background task 'watch something' ended: OSError('disk')"
