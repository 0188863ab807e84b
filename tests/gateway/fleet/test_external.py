"""Servers that somebody else runs, behind the gateway: what they serve, and when they no longer do."""

import json
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from engines.clients.http import HttpEngine
from engines.config import EngineConfig
from engines.engine import Json
from engines.errors import ConfigError, EngineRefused
from gateway.config.load import explain, load, with_secrets
from gateway.config.schema import Config
from gateway.config.serve_document import serve_config
from tests.rigs.calls import until
from tests.rigs.openai_server import OpenAiServer
from tests.rigs.rig import Rig, SimReplica, StartRig, described

URL = "http://127.0.0.1:9"
SOON_S = 30.0


@pytest.fixture
async def openai() -> AsyncIterator[OpenAiServer]:
    server = await OpenAiServer([], "").start()
    server.listing["data"][0]["id"] = "sim"  # the policy's
    yield server
    await server.stop()


async def joined(rig: Rig, url: str) -> Rig:
    """The rig once the external server at `url` is one of its replicas."""
    config = EngineConfig.model_validate({"kind": "external", "url": url})
    rig.external = [await described(config, "theirs-0", "engine")]
    await until(rig.states, lambda got: "theirs-0" in got)
    return rig


async def alone(rig: Rig, url: str) -> Rig:
    """The rig with the external server as its only replica."""
    await joined(rig, url)
    for replica in rig.replicas:
        await replica.kill()
    rig.replicas = []
    await until(rig.states, lambda got: list(got) == ["theirs-0"])
    return rig


async def test_a_vllm_server_of_others_takes_rollouts_and_weights(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    theirs = await SimReplica("theirs", 5, rig.sim).start()
    await joined(rig, theirs.info.url)
    assert (await rig.get("/get_world_size"))[1] == {"world_size": 2}
    await rig.open_group()
    await rig.update()
    assert await rig.states() == {"engine-0": "SERVING", "theirs-0": "SERVING"}
    reply = await rig.complete([[1, 2, 3]] * 4)
    assert {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]} == {1}
    await theirs.kill()


def refusing(monkeypatch: pytest.MonkeyPatch, status: int, times: int) -> list[str]:
    """Has a proxy refuse so many looks at the version of the external server; returns those so far."""
    refused: list[str] = []
    read = HttpEngine.read

    async def proxied(engine: HttpEngine, method: str, path: str, body: Json | None, timeout_s: float) -> bytes:
        if path == "/weight_info" and engine.replica_id == "theirs-0" and len(refused) < times:
            refused.append(path)
            raise EngineRefused(f"{path} answered {status}", status=status, body={}, replica_id=engine.replica_id)
        return await read(engine, method, path, body, timeout_s)

    monkeypatch.setattr(HttpEngine, "read", proxied)
    return refused


async def told_of(rig: Rig) -> list[str]:
    """Events of the external server."""
    events = (await rig.get("/status"))[1]["events"]
    return [event["text"] for event in events if event["subject"] == "theirs-0"]


async def test_a_key_that_a_server_refuses_at_its_version_is_told_once_until_it_is_mended(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(1)
    theirs = await SimReplica("theirs", 5, rig.sim).start()
    refusing(monkeypatch, status=403, times=3)
    await joined(rig, theirs.info.url)
    told = [text for text in await told_of(rig) if "403" in text]
    assert told == ["refused: replica theirs-0: /weight_info answered 403"]
    assert (await rig.get("/status"))[1]["replicas_refused"] == {}
    await theirs.kill()


async def test_a_server_without_weight_routes_serves_until_the_first_update(
    start_rig: StartRig, openai: OpenAiServer
) -> None:
    rig = await joined(await start_rig(1), openai.url)
    assert (await rig.get("/get_world_size"))[1] == {"world_size": 1}
    assert await rig.states() == {"engine-0": "SERVING", "theirs-0": "SERVING"}
    await rig.open_group()
    await rig.update()
    assert await rig.states() == {"engine-0": "SERVING", "theirs-0": "SYNCING"}
    status = (await rig.get("/status"))[1]
    reason = next(one["reason"] for one in status["replicas"] if one["replica_id"] == "theirs-0")
    assert reason == (
        f"{openai.url} (unknown) cannot take weights: it holds those it came with, and the fleet is at version 1"
    )
    for path in ("/pause?mode=keep", "/resume", "/reset_prefix_cache"):
        assert (await rig.post(path))[0] == 200, "a replica left behind is in nobody's way"


async def test_what_a_server_without_weight_routes_cannot_do_is_refused_by_name(
    start_rig: StartRig, openai: OpenAiServer
) -> None:
    rig = await alone(await start_rig(1), openai.url)
    named = "theirs-0"
    for path, body, expected in (
        ("/tokenize", {"prompt": "a"}, 404),
        ("/pause?mode=keep", None, 409),
        ("/reset_prefix_cache", None, 409),
        ("/init_weight_transfer_engine", {"init_info": {"world_size": 1}}, 409),
    ):
        status, reply = await rig.post(path, body)
        assert status == expected, (path, reply)
        assert named in reply["error"]["message"], path
    assert (await rig.get("/health"))[0] == 200
    assert (await rig.post("/v1/completions", {"prompt": "a"}))[0] == 200, "a refused pause left the gate closed"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kind": "external"}, "kind: external needs http://host:port"),
        ({"kind": "external", "url": f"{URL}/v1"}, "without /v1 or another path"),
        ({"kind": "external", "url": URL, "num_replicas": 2}, "one URL is one replica"),
        ({"kind": "external", "url": URL, "api_key": "hunter2"}, "api_key must be env:NAME or file:PATH"),
        ({"kind": "sim", "url": URL}, "url and api_key are for kind: external; kind: sim starts its own server"),
    ],
)
def test_a_mistake_in_an_external_group_is_told(engine: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [f"engine={json.dumps(engine)}"], {})
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_key_is_read_by_who_needs_it_and_shown_to_nobody() -> None:
    overrides = ["engine.kind=external", f"engine.url={URL}", "engine.api_key=env:JUDGE_KEY"]
    config = load(None, overrides, {})
    args = serve_config(config)["applications"][0]["args"]
    assert args["engine"]["api_key"] == "env:JUDGE_KEY"
    assert with_secrets(Config.model_validate(args), {"JUDGE_KEY": "hunter2"}).engine.api_key == SecretStr("hunter2")
    assert "hunter2" not in str(with_secrets(config, {"JUDGE_KEY": "hunter2"}).model_dump(mode="json"))
    assert {s.value for s in explain(None, overrides, {}) if s.key == "engine.api_key"} == {"**********"}
    with pytest.raises(ConfigError, match=r"engine\.api_key: no key in env:JUDGE_KEY"):
        with_secrets(config, {})


def test_the_key_of_a_group_stays_with_it() -> None:
    judge = {"kind": "external", "url": URL, "api_key": "env:A"}
    config = Config.model_validate({"engine": {"kind": "sim"}, "engines": {"policy": {}, "judge": judge}})
    args = serve_config(config)["applications"][0]["args"]
    assert args["engines"]["judge"]["api_key"] == "env:A"
    groups = with_secrets(Config.model_validate(args), {"A": "a"}).groups
    assert groups["judge"].api_key == SecretStr("a")
    assert groups["policy"].api_key is None
    with pytest.raises(ConfigError, match=r"engines\.judge\.api_key: 2 keys where one is expected"):
        with_secrets(Config.model_validate(args), {"A": "a b"})
