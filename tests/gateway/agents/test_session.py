"""The record of an agent's session: what was sampled, after which prompt, by which weights, and how it ended."""

import asyncio
import base64
import math
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines.errors import EngineFailed
from gateway.agents.messages import Messages
from gateway.dialects.rendering import Rendering
from sim.model import SimModel
from tests.rigs.calls import until
from tests.rigs.rig import Json, Rig, StartRig
from tests.rigs.sessions import answered, frozen, masked, read, record, said, spans, turn, whole
from trainer_client.sessions.trajectories import trajectories_of

# The simulated engine answers this with more than 80 tokens at temperature 0.
LONG: Json = {"max_tokens": 80}
ASKED = "three"


async def killed(start_rig: StartRig, rig: Rig, tmp_path: Path) -> Rig:
    """A gateway with the ledger that `rig`'s leaves where it is killed now."""
    left = shutil.copytree(str(rig.config.gateway.ledger), tmp_path / uuid.uuid4().hex)
    await rig.stop_gateway()
    rig.hurry()
    return await start_rig(2, replicas=rig.replicas, gateway={"ledger": str(left)})


async def written(rig: Rig) -> None:
    """Return when the ledger has the tokens of the last call that the engines have made."""
    made = sum(len(sample.tokens) for replica in rig.replicas for sample in replica.scheduler.stalled)
    await until(lambda: record(rig, "one"), lambda got: len(got[1][-1]["token_ids"]) >= made)
    await until(lambda: rig.get("/status"), lambda got: not got[1]["ledger"]["unwritten"])


async def test_a_session_is_recorded_read_and_acked(rig: Rig) -> None:
    first = await said(rig, "one", "hello")
    await said(rig, "one", "hello", first, "more")
    head = await frozen(rig, "one", reward=0.5)
    assert (head["state"], head["calls"], head["open_calls"], head["reward"]) == ("frozen", 2, 0, 0.5)
    assert head["tokens"] == {"sampled": 12, "trainable": 12, "masked": {}}
    _, calls = await record(rig, "one")
    assert [(call["parent"], call["root_reason"]) for call in calls] == [(None, "first"), (0, None)]
    assert [(call["state"], call["mask"], call["error"]) for call in calls] == [("ended", None, None)] * 2
    assert [len(call["token_ids"]) for call in calls] == [len(call["logprobs"]) for call in calls] == [6, 6]
    assert [spans(call) for call in calls] == [[(0, 0, 6)]] * 2
    assert len(whole(calls, 1)) == calls[1]["prompt_tokens"] + 6
    assert calls[0]["sampling"].items() >= {"max_tokens": 6, "temperature": 0.0}.items()
    status, reply = await rig.post("/v1/sessions/one/ack")
    assert (status, reply) == (200, {"id": "one", "state": "acked"})
    assert (await rig.get("/v1/sessions/one"))[0] == 404


async def test_a_session_goes_on_after_a_restart_of_the_gateway(
    start_rig: StartRig, kept_rig: Rig, tmp_path: Path
) -> None:
    first = await said(kept_rig, "one", "hello")
    asking = asyncio.create_task(answered(kept_rig, "one", turn("hello", first, "more")))
    await kept_rig.begun(tokens=2)
    _, before = await record(kept_rig, "one")
    await kept_rig.stop_gateway()
    status, error = await asking
    assert (status, error["error"]["type"]) == (503, "overloaded_error")
    kept_rig.hurry()
    again = await start_rig(replicas=kept_rig.replicas, gateway={"ledger": str(tmp_path / "ledger")})
    head, calls = await record(again, "one")
    assert head["durable"]
    assert calls[0] == before[0]
    assert masked(calls) == [None, "gateway_ended"]
    await said(again, "one", "hello", first, "more")
    _, calls = await record(again, "one")
    assert [(call["parent"], call["retry_of"]) for call in calls] == [(None, None), (0, None), (0, 1)]


async def test_rewards_and_a_freeze_outlive_the_gateway(start_rig: StartRig, kept_rig: Rig, tmp_path: Path) -> None:
    await kept_rig.post("/v1/sessions", {"id": "one", "metadata": {"task": 7}})
    await said(kept_rig, "one", "hello")
    await kept_rig.post("/v1/sessions/one/reward", {"reward": 2, "call": 0})
    await frozen(kept_rig, "one", reward=0.5, info={"passed": True})
    before = await record(kept_rig, "one")
    again = await killed(start_rig, kept_rig, tmp_path)
    assert await record(again, "one") == before
    assert (await answered(again, "one", turn("more")))[0] == 409
    assert (await again.post("/v1/sessions/one/ack"))[0] == 200
    last = await killed(start_rig, again, tmp_path)
    assert (await last.get("/v1/sessions/one"))[0] == 404


async def test_a_late_call_does_not_begin_an_acked_session_again(rig: Rig) -> None:
    for session in ("one", "two"):
        await said(rig, session, "hello")
        await frozen(rig, session)
        await rig.post(f"/v1/sessions/{session}/ack")
    assert (await rig.post("/v1/sessions", {"id": "two"}))[0] == 201
    for session, status in (("one", 409), ("two", 200)):
        assert (await answered(rig, session, turn("more")))[0] == status, session


async def test_agents_are_answered_where_no_ledger_can_be_kept(start_rig: StartRig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rig = await start_rig(gateway={"ledger": str(tmp_path / "file" / "ledger")})
    await said(rig, "one", "hello")
    head, [call] = await record(rig, "one")
    assert (head["durable"], call["mask"]) == (False, None)


async def test_a_killed_gateway_leaves_the_tokens_that_it_had_written(
    start_rig: StartRig, kept_rig: Rig, tmp_path: Path
) -> None:
    asking = asyncio.create_task(answered(kept_rig, "one", turn(ASKED, **LONG)))
    await kept_rig.begun(tokens=9)
    await written(kept_rig)
    again = await killed(start_rig, kept_rig, tmp_path)
    await asking
    head, [call] = await record(again, "one")
    assert (call["state"], call["mask"], len(call["token_ids"]), len(call["logprobs"])) == (
        "cut",
        "gateway_ended",
        9,
        9,
    )
    assert spans(call) == [(0, 0, 9)]
    assert head["tokens"] == {"sampled": 9, "trainable": 0, "masked": {"gateway_ended": 9}}
    undisturbed = await said(again, "two", ASKED, **LONG)
    assert undisturbed
    _, [other] = await record(again, "two")
    assert other["token_ids"][:9] == call["token_ids"]


async def test_a_turn_whose_replica_died_is_one_call_with_the_tokens_of_both(kept_rig: Rig) -> None:
    await said(kept_rig, "undisturbed", ASKED, **LONG)
    asking = asyncio.create_task(answered(kept_rig, "one", turn(ASKED, **LONG)))
    await kept_rig.begun(tokens=9)
    [busy] = [replica for replica in kept_rig.replicas if replica.scheduler.stalled]
    await busy.kill()
    kept_rig.hurry()
    assert (await asking)[0] == 200
    _, [whole_call] = await record(kept_rig, "undisturbed")
    _, [call] = await record(kept_rig, "one")
    for field in ("prompt_token_ids", "token_ids", "logprobs", "weight_versions", "mask", "finish_reason"):
        assert call[field] == whole_call[field], field


async def test_an_update_inside_a_turn_is_in_its_spans_and_one_between_turns_too(start_rig: StartRig) -> None:
    rig = await start_rig(1, weights={"in_flight": "keep"})
    await rig.open_group()
    asking = asyncio.create_task(answered(rig, "one", turn(ASKED, **LONG)))
    await rig.begun(tokens=20)
    await rig.update()
    rig.hurry()
    assert (await asking)[0] == 200
    await rig.update()
    await said(rig, "one", ASKED)
    _, [first, second] = await record(rig, "one")
    assert spans(first) == [(0, 0, 20), (1, 20, len(first["token_ids"]))]
    assert spans(second) == [(2, 0, 6)]


async def test_a_client_that_leaves_cuts_its_call_with_the_tokens_so_far(rig: Rig) -> None:
    asking = asyncio.create_task(answered(rig, "one", turn(ASKED, **LONG)))
    await rig.begun(tokens=9)
    asking.cancel()
    await until(lambda: record(rig, "one"), lambda got: not got[0]["open_calls"])
    _, [call] = await record(rig, "one")
    assert (call["state"], call["mask"], len(call["token_ids"])) == ("cut", "client_left", 9)
    rig.hurry()
    await said(rig, "one", ASKED, **LONG)
    _, calls = await record(rig, "one")
    assert [(call["parent"], call["retry_of"]) for call in calls] == [(None, None), (None, 0)]


async def test_a_call_that_is_made_again_with_a_higher_limit_is_a_retry(rig: Rig) -> None:
    await said(rig, "one", ASKED, max_tokens=6)
    answer = await said(rig, "one", ASKED, max_tokens=12)
    await said(rig, "one", ASKED, answer, "more")
    _, calls = await record(rig, "one")
    assert [(call["parent"], call["retry_of"]) for call in calls] == [(None, None), (None, 0), (1, None)]
    assert [call["finish_reason"] for call in calls[:2]] == ["length", "length"]


class BrokenOff(web.Response):
    """Is sent to a client that has left."""

    async def write_eof(self, data: bytes = b"") -> None:
        raise ConnectionResetError("the client is gone")


async def test_several_answers_to_one_prompt_are_no_retries(rig: Rig) -> None:
    body = turn(ASKED, temperature=1.0)
    await asyncio.gather(*(answered(rig, "one", body) for _ in range(2)))
    await answered(rig, "one", body)
    _, calls = await record(rig, "one")
    assert [call["retry_of"] for call in calls] == [None] * 3


async def test_a_call_that_its_client_says_to_make_again_is_a_retry(rig: Rig) -> None:
    await said(rig, "one", ASKED)
    headers = {"x-stainless-retry-count": "1"}
    async with rig.client.post(f"{rig.url}/sessions/one/v1/messages", json=turn(ASKED), headers=headers) as response:
        assert response.status == 200
    _, calls = await record(rig, "one")
    assert [call["retry_of"] for call in calls] == [None, 0]


async def test_a_retry_takes_the_place_of_the_call_that_its_client_left_alone(rig: Rig) -> None:
    left = asyncio.create_task(answered(rig, "one", turn(ASKED, **LONG)))
    await rig.begun(tokens=6)
    others = [asyncio.create_task(answered(rig, "one", turn(ASKED, **LONG))) for _ in range(2)]
    await rig.begun(samples=3, tokens=9)
    left.cancel()
    await until(lambda: record(rig, "one"), lambda got: got[0]["open_calls"] != 3)
    rig.hurry()
    await asyncio.gather(*others)
    headers = {"x-stainless-retry-count": "1"}
    url = f"{rig.url}/sessions/one/v1/messages"
    async with rig.client.post(url, json=turn(ASKED, **LONG), headers=headers) as response:
        assert response.status == 200
    await said(rig, "one", ASKED, **LONG)
    session = await read(rig, "one")
    assert [(call.mask, call.retry_of) for call in session.calls] == [
        ("client_left", None), (None, None), (None, None), (None, 0), (None, None)
    ]  # fmt: skip
    assert sorted(row.calls for row in trajectories_of(session)) == [(1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_its_client_left_as_it_was_sent_is_not_trained(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: Any) -> Any:
        raise ConnectionResetError("the client is gone")

    monkeypatch.setattr(Messages, "events", broken)
    monkeypatch.setattr("gateway.http.routes.agents.reply", lambda _: BrokenOff())
    async with asyncio.timeout(20):
        await asyncio.gather(answered(rig, "one", turn(ASKED, stream=stream)), return_exceptions=True)
    head, [call] = await record(rig, "one")
    assert (call["state"], call["mask"], call["finish_reason"]) == ("cut", "client_left", "length")
    assert head["tokens"] == {"sampled": 6, "trainable": 0, "masked": {"client_left": 6}}


async def test_an_image_is_kept_once_as_its_bytes(start_rig: StartRig, kept_rig: Rig, tmp_path: Path) -> None:
    png = b"\x89PNG\x00" * 9
    seen: list[Json] = [{"type": "text", "text": "see"}]
    for media_type, text in (("image/png", base64.b64encode(png).decode()), ("image/gif", "R0lG")):
        source = {"type": "base64", "media_type": media_type, "data": text}
        seen.append({"type": "image", "source": source})
    asked = turn("x") | {"messages": [{"role": "user", "content": seen}]}
    _, reply = await answered(kept_rig, "one", asked)
    asked["messages"] += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": seen[:2]}]
    await answered(kept_rig, "one", asked)
    again = await killed(start_rig, kept_rig, tmp_path)
    session = await read(again, "one")
    assert [len(call.media) for call in session.calls] == [2, 3]
    assert [(one.media_type, one.data) for one in session.calls[1].media] == [
        ("image/png", png),
        ("image/gif", b"GIF"),
        ("image/png", png),
    ]
    _, calls = await record(again, "one")
    assert [one.get("data") for call in calls for one in call["media"]] == [
        png, b"GIF", None, None, None
    ]  # fmt: skip
    assert (await again.get("/status"))[1]["ledger"]["session_bytes"] < 3 * 2000 + 4000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_freeze_cuts_open_calls_and_refuses_later_ones(rig: Rig, stream: bool) -> None:
    asking = asyncio.create_task(answered(rig, "one", turn(ASKED, **LONG, stream=stream)))
    await rig.begun(tokens=9)
    head = await frozen(rig, "one")
    assert (head["open_calls"], head["tokens"]["masked"]) == (0, {"frozen": 9})
    status, told = await asking
    assert (status, "session is frozen" in str(told)) == (200 if stream else 409, True)
    status, told = await answered(rig, "one", turn("more"))
    assert (status, told["type"], told["error"]["type"]) == (409, "error", "invalid_request_error")
    body: Json = {"model": "sim", "messages": [{"role": "user", "content": "more"}]}
    status, told = await rig.post("/sessions/one/v1/chat/completions", body)
    assert (status, told["error"]["type"]) == (409, "SessionFrozen")


async def test_a_freeze_waits_for_open_calls_as_long_as_it_is_asked_to(rig: Rig) -> None:
    asking = asyncio.create_task(answered(rig, "one", turn(ASKED, **LONG)))
    await rig.begun(tokens=9)
    freezing = asyncio.create_task(frozen(rig, "one", wait_s=60))
    await until(lambda: record(rig, "one"), lambda got: got[0]["state"] != "open")
    rig.hurry()
    assert (await freezing)["tokens"] == {"sampled": 80, "trainable": 80, "masked": {}}
    assert (await asking)[0] == 200


async def test_an_answer_that_no_engine_parses_keeps_its_tokens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unparsed(*_: Any) -> Json:
        raise EngineFailed("the parser failed")

    monkeypatch.setattr(Rendering, "message", unparsed)
    status, error = await answered(rig, "one", turn(ASKED))
    assert (status, error["error"]["type"]) == (502, "api_error")
    _, [call] = await record(rig, "one")
    assert (call["state"], call["mask"], len(call["token_ids"])) == ("failed", "unparsed", 6)
    assert call["error"]["message"] == "the parser failed"


async def test_an_answer_is_parsed_by_a_later_engine_where_all_died_after_it_was_made(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    rig.replicas[0].inject(held="/derender")
    asking = asyncio.create_task(answered(rig, "one", turn(ASKED)))
    await until(lambda: rig.replicas[0].num_held)
    await rig.replicas[0].kill()
    later = await rig.add_replica("engine-0")
    assert (await asking)[0] == 200
    _, [call] = await record(rig, "one")
    assert (call["state"], call["mask"], len(call["token_ids"])) == ("ended", None, 6)
    assert later.generated_tokens == 0


async def test_a_call_that_fails_is_recorded_with_its_error(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"max_attempts": 1})
    for replica in rig.replicas:
        replica.inject(status=500)
    status, _ = await answered(rig, "one", turn(ASKED))
    assert status == 502
    _, [call] = await record(rig, "one")
    assert (call["state"], call["mask"], call["token_ids"]) == ("failed", "failed", [])
    assert "500" in call["error"]["message"]


async def test_a_turn_that_no_engine_renders_is_recorded_without_token_ids(rig: Rig) -> None:
    for replica in rig.fleet.replicas:
        routes = (route for route in replica.info.capabilities if not route.endswith("render"))
        replica.info = replace(replica.info, capabilities=frozenset(routes))
    await said(rig, "one", ASKED)
    head, [call] = await record(rig, "one")
    assert (call["state"], call["mask"], call["token_ids"], call["root_reason"]) == (
        "ended",
        "no_token_ids",
        [],
        "unknown",
    )
    assert head["tokens"] == {"sampled": 6, "trainable": 0, "masked": {"no_token_ids": 6}}


async def test_a_turn_whose_engine_gives_no_log_probs_is_masked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimModel, "logprob", lambda *_: math.nan)
    await said(rig, "one", ASKED, temperature=1.0)
    _, [call] = await record(rig, "one")
    assert (call["mask"], call["logprobs"]) == ("no_logprobs", None)


async def test_an_abort_by_the_trainer_cuts_a_call(rig: Rig) -> None:
    asking = asyncio.create_task(answered(rig, "one", turn(ASKED, **LONG)))
    await rig.begun(tokens=9)
    assert (await rig.post("/pause?mode=abort"))[0] == 200
    status, reply = await asking
    assert (status, reply["stop_reason"]) == (200, "max_tokens")
    _, [call] = await record(rig, "one")
    assert (call["state"], call["mask"], call["finish_reason"]) == ("cut", "cut", "abort")


async def test_no_client_gets_log_probs(rig: Rig) -> None:
    body: Json = {"model": "sim", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 6}
    _, reply = await rig.post("/sessions/one/v1/chat/completions", body)
    assert reply["choices"][0]["logprobs"] is None
    _, [call] = await record(rig, "one")
    assert len(call["logprobs"]) == 6


async def test_a_record_costs_at_most_three_times_its_ids_and_log_probs(
    kept_rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(6):
        await said(kept_rig, "one", ASKED * 10 + str(index), **LONG)
    _, calls = await record(kept_rig, "one")
    raw = sum(4 * len(call["prompt_token_ids"]) + 8 * len(call["token_ids"]) for call in calls)
    [file] = [path for path in (tmp_path / "ledger").iterdir() if path.name.startswith("session")]
    assert file.stat().st_size <= 3 * raw
