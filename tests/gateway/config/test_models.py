"""Several models behind one URL: the policy, which updates and pauses concern, and frozen ones beside it."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError, DeadlineExceeded, UnknownModel
from engines.types import EngineKind, ReplicaInfo
from gateway.config.load import load
from gateway.config.models import Models
from tests.rigs.calls import until
from tests.rigs.openai_server import OpenAiServer
from tests.rigs.rig import Json, Rig, StartRig

URL = "http://127.0.0.1:9"
JUDGE = {"served_model_name": "a-judge", "frozen": True, "num_replicas": 1}


def groups(**trees: Json) -> dict[str, EngineConfig]:
    return {name: EngineConfig.model_validate({"kind": "sim", **tree}) for name, tree in trees.items()}


def info(group: str, model: str) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=f"{group}-0", incarnation="1", group=group, kind=EngineKind.EXTERNAL, url=URL, model=model,
        world_size=0, max_model_len=None, max_num_seqs=1, engine_version="",
    )  # fmt: skip


@pytest.fixture
async def start_pair(start_rig: StartRig) -> Callable[..., Awaitable[Rig]]:
    """Starts two replicas of the policy "sim" and one of the frozen "a-judge"; keywords as `start_rig` takes them."""

    async def start(**sections: Any) -> Rig:
        return await start_rig(engines={"policy": {}, "judge": JUDGE}, **sections)

    return start


StartPair = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def pair(start_pair: StartPair) -> Rig:
    return await start_pair()


async def judged(rig: Rig, **sampling: Any) -> Json:
    return await rig.complete([[5, 6]], **{"model": "a-judge", **sampling})


def versions(reply: Json) -> set[int]:
    return {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]}


# Who is asked


async def test_each_request_goes_to_the_model_that_it_names(pair: Rig) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for model, placed in (
        ("a-judge", {"judge-0"}),
        ("sim", {"policy-0", "policy-1"}),
        (None, {"policy-0", "policy-1"}),
    ):
        before = {replica.replica_id: replica.placed for replica in pair.fleet.replicas}
        named = {} if model is None else {"model": model}
        for path, body in (
            ("/v1/completions", {"prompt": [[5], [6]], "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
        ):
            status, reply = await pair.post(path, named | body)
            assert status == 200, reply
            async with pair.client.post(pair.url + path, json=named | body | {"stream": True}) as response:
                assert response.status == 200, await response.text()
                await response.read()
        after = {replica.replica_id: replica.placed for replica in pair.fleet.replicas}
        assert {name for name in after if after[name] > before[name]} == placed


async def test_an_unknown_model_is_told_what_there_is(pair: Rig) -> None:
    for path, rest in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
    ):
        status, reply = await pair.post(path, {"model": "gpt-9", **rest})
        assert (status, reply["error"]["param"]) == (404, "model")
        assert "'gpt-9' is not served here; there is sim, a-judge" in reply["error"]["message"]


async def test_all_models_are_listed_and_the_policy_first(pair: Rig) -> None:
    _, listed = await pair.get("/v1/models")
    assert listed["object"] == "list"
    assert [(card["id"], card["object"]) for card in listed["data"]] == [("sim", "model"), ("a-judge", "model")]
    assert all(card["max_model_len"] for card in listed["data"])


async def test_a_judge_that_is_away_is_not_listed_and_the_policy_goes_on(start_pair: StartPair) -> None:
    rig = await start_pair(gateway={"queue_timeout_s": 0.3})
    await rig.replicas.pop().kill()
    await rig.until({"policy-0": "SERVING", "policy-1": "SERVING"})
    assert (await rig.get("/health"))[0] == 503
    assert [card["id"] for card in (await rig.get("/v1/models"))[1]["data"]] == ["sim"]
    await rig.complete([[5]])
    for path in ("/v1/completions", "/tokenize"):
        status, reply = await rig.post(path, {"model": "a-judge", "prompt": "a"})
        assert status == 504, "it is a model of this app, so its absence is a wait and no 404"
        assert "no replica of 'a-judge'" in reply["error"]["message"]
    await rig.add_replica("judge-0")
    await rig.until({"judge-0": "SERVING", "policy-0": "SERVING", "policy-1": "SERVING"})
    assert (await rig.get("/health"))[0] == 200
    await judged(rig)


async def test_judges_alone_are_no_fleet_for_a_trainer(start_pair: StartPair) -> None:
    fleet = {"discover_interval_s": 0.05, "probe_interval_s": 0.05, "lost_after_s": 0.2, "complete_within_s": 0.1}
    rig = await start_pair(fleet=fleet)
    for replica in (rig.replicas.pop(0), rig.replicas.pop(0)):
        await replica.kill()
    await rig.until({"judge-0": "SERVING"})
    await asyncio.sleep(0.2)
    assert (await rig.get("/health"))[0] == 503
    assert (await rig.get("/v1/models"))[0] == 504, "TRL takes the first of the list for its own"


async def test_a_prompt_is_measured_by_the_model_that_it_is_for(pair: Rig) -> None:
    judge = pair.fleet.replicas[0]
    judge.info = dataclasses.replace(judge.info, max_model_len=16)
    body = {"prompt": [[5] * 20], "max_tokens": 1}
    status, reply = await pair.post("/v1/completions", body | {"model": "a-judge"})
    assert (status, "max_model_len = 16" in reply["error"]["message"]) == (400, True)
    await pair.complete([[5] * 20], max_tokens=1)


# Nobody waits for another model


@pytest.mark.parametrize(("full", "prompts", "slots", "other"), [("a-judge", 20, 8, "sim"), ("sim", 40, 16, "a-judge")])
async def test_a_full_model_does_not_block_another(
    start_pair: StartPair, full: str, prompts: int, slots: int, other: str
) -> None:
    rig = await start_pair()
    many = [[digit] for digit in range(3, 3 + prompts)]
    asking = asyncio.ensure_future(rig.complete(many, model=full, max_tokens=100, ignore_eos=True))
    await rig.begun(slots)
    await until_queued(rig, full)
    await rig.complete([[5], [6]], model=other, max_tokens=1)
    lengths = {queue["model"]: queue["queue_length"] for queue in (await rig.get("/status"))[1]["models"]}
    assert lengths[full] > 0
    assert lengths[other] == 0
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def until_queued(rig: Rig, model: str) -> None:
    """Returns when some rollouts for `model` have to wait for a place."""
    await until(
        lambda: rig.get("/status"),
        lambda got: any(one["queue_length"] for one in got[1]["models"] if one["model"] == model),
    )


async def test_the_judge_answers_in_the_middle_of_an_update(pair: Rig) -> None:
    await pair.open_group()
    await pair.post("/start_weight_update", {})
    assert versions(await judged(pair)) == {0}
    await pair.post("/update_weights", {"update_info": pair.tensors})
    waiting = asyncio.create_task(pair.complete([[5]]))
    assert await pair.states() == {"judge-0": "SERVING", "policy-0": "UPDATING", "policy-1": "UPDATING"}
    assert versions(await judged(pair)) == {0}
    assert not waiting.done()
    await pair.post("/finish_weight_update", {})
    assert versions(await waiting) == {1}


async def test_a_pause_holds_the_policy_alone(pair: Rig) -> None:
    assert (await pair.post("/pause?mode=keep"))[0] == 200
    waiting = asyncio.create_task(pair.complete([[5]]))
    assert len((await judged(pair))["choices"]) == 1
    assert not waiting.done()
    assert (await pair.post("/resume"))[0] == 200
    await waiting


# Weights


async def test_frozen_replicas_keep_version_0_their_tokens_and_their_service(pair: Rig) -> None:
    before = [await pair.complete([[4, 5, 6]], model=model, temperature=0) for model in ("sim", "a-judge")]
    await pair.open_group()
    await pair.update()
    await pair.update()
    after = [await pair.complete([[4, 5, 6]], model=model, temperature=0) for model in ("sim", "a-judge")]
    ids = [[reply["choices"][0]["token_ids"] for reply in replies] for replies in (before, after)]
    assert ids[0][0] != ids[1][0]
    assert ids[0][1] == ids[1][1]
    assert [versions(reply) for reply in after] == [{2}, {0}]
    _, status = await pair.get("/status")
    assert (status["policy"], status["weight_version"]) == ("sim", 2)
    shown = {r["replica_id"]: (r["model"], r["frozen"], r["state"], r["weight_version"]) for r in status["replicas"]}
    assert shown == {
        "judge-0": ("a-judge", True, "SERVING", 0),
        "policy-0": ("sim", False, "SERVING", 2),
        "policy-1": ("sim", False, "SERVING", 2),
    }


async def test_a_trainer_makes_room_for_the_workers_of_the_policy_alone(pair: Rig) -> None:
    assert await pair.get("/get_world_size") == (200, {"world_size": 2})


async def test_a_judge_that_dies_breaks_no_transfer_group_and_serves_again_at_once(pair: Rig) -> None:
    await pair.open_group()
    await pair.update()
    await pair.replicas[-1].kill()
    await pair.add_replica("judge-0")
    await pair.until({"judge-0": "SERVING", "policy-0": "SERVING", "policy-1": "SERVING"})
    assert versions(await judged(pair)) == {0}
    await pair.update()


async def test_where_all_is_frozen_weights_and_pauses_are_refused_with_the_reason(start_rig: StartRig) -> None:
    rig = await start_rig(1, engines={"judge": JUDGE, "reference": {"frozen": True}})
    calls = [
        ("GET", "/get_world_size"),
        ("POST", "/pause?mode=keep"),
        ("POST", "/resume"),
        ("POST", "/reset_prefix_cache"),
    ]
    for method, path in calls:
        status, reply = await (rig.get(path) if method == "GET" else rig.post(path))
        assert (status, "every model here is frozen (a-judge, sim)" in reply["error"]["message"]) == (409, True)
    status, reply = await rig.post("/v1/completions", {"prompt": "a"})
    assert (status, reply["error"]["param"]) == (400, "model")
    assert "name one of a-judge, sim" in reply["error"]["message"]
    assert len((await rig.get("/v1/models"))[1]["data"]) == 2
    await judged(rig)


# Servers of others


@pytest.fixture
async def theirs() -> Any:
    server = await OpenAiServer([], "").start()
    yield server
    await server.stop()


async def test_a_frozen_server_of_others_serves_on_after_an_update(start_rig: StartRig, theirs: OpenAiServer) -> None:
    judge = {"kind": "external", "url": theirs.url, "model": "", "num_replicas": 1, "frozen": True}
    rig = await start_rig(engines={"policy": {}, "judge": judge})
    await rig.open_group()
    await rig.update()
    assert await rig.states() == {"judge-0": "SERVING", "policy-0": "SERVING", "policy-1": "SERVING"}
    assert [card["id"] for card in (await rig.get("/v1/models"))[1]["data"]] == ["sim", "gpt"]
    status, reply = await rig.post("/v1/completions", {"model": "gpt", "prompt": "a"})
    assert status == 200, reply
    assert (versions(reply), reply["choices"][0]["text"]) == ({0}, "echo")
    assert {body["model"] for body in theirs.bodies} == {"gpt"}


async def test_a_server_of_others_with_another_model_says_why_it_is_not_taken_in(
    start_rig: StartRig, theirs: OpenAiServer
) -> None:
    stranger = {"kind": "external", "url": theirs.url, "model": "", "num_replicas": 1}
    rig = await start_rig(engines={"policy": {}, "theirs": stranger})
    assert await rig.states() == {"policy-0": "SERVING", "policy-1": "SERVING"}
    status, report = await rig.get("/health")
    assert status == 503
    reason = report["replicas_refused"]["theirs-0"]
    assert "engines.policy serves 'sim' and engines.theirs serves 'gpt'" in reason
    assert "frozen: true" in reason
    await rig.complete([[5]])


# What the configuration says


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"model": "b"}, "engines.one serves 'a' and engines.two serves 'b'"),
        ({"model": "b"}, "say frozen: true for the one whose weights never change"),
        ({"model": "a", "frozen": True}, "engines.two and engines.one both serve 'a', but engines.two alone is frozen"),
        ({"model": "a", "frozen": True}, "a served_model_name of its own"),
        ({"kind": "external", "url": URL, "model": "b"}, "say frozen: true"),
    ],
)
def test_groups_that_do_not_fit_together_are_named_with_the_remedy(second: Json, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["engine.kind=sim", "engines.one.model=a", f"engines.two={json.dumps(second)}"], {})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("trees", "names", "policy"),
    [
        ({"big": {"model": "a"}, "small": {"model": "b", "served_model_name": "a"}}, ["a"], "a"),
        ({"a": {"model": "m", "served_model_name": "r", "frozen": True}, "b": {"model": "m"}}, ["m", "r"], "m"),
        ({"judge": {"model": "j", "frozen": True}}, ["j"], None),
    ],
    ids=["two checkpoints of one name", "one checkpoint under two names", "a judge alone"],
)
def test_names_make_the_models_and_a_request_without_one_means_the_first(
    trees: Json, names: list[str], policy: str | None
) -> None:
    models = Models(groups(**trees))
    assert (models.names, models.policy, models.asked(None)) == (names, policy, names[0])
    with pytest.raises(UnknownModel):
        models.asked(["a"])


def test_a_server_of_others_has_a_name_once_it_joined() -> None:
    models = Models(groups(theirs={"kind": "external", "url": URL}, judge={"model": "j", "frozen": True}))
    with pytest.raises(DeadlineExceeded, match="engine group theirs has not joined"):
        models.asked(None)
    with pytest.raises(UnknownModel, match=r"there is j \(engine group theirs has not joined"):
        models.asked("gpt")
    models.join(info("theirs", "gpt"))
    assert (models.names, models.asked(None), models.asked("gpt")) == (["gpt", "j"], "gpt", "gpt")
    models.join(info("theirs", "gpt-2"))
    assert models.names == ["gpt-2", "j"]
    with pytest.raises(ConfigError, match="alone is frozen"):
        models.join(info("theirs", "j"))
    assert models.names == ["gpt-2", "j"]
