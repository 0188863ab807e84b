"""Servers that somebody else runs: what is found out about them, and what they are asked."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from engines.clients.external import ExternalEngine, ExternalServer, external_engine
from engines.clients.sglang_engine import SglangEngine
from engines.config import EngineConfig, SimConfig
from engines.errors import EngineError, EngineFailed, EngineRefused, EngineStartFailed, EngineUnreachable
from engines.types import Dialect, EngineKind, PauseMode
from sim.server import SimServer
from tests.rigs.openai_server import OpenAiServer
from tests.rigs.rig import SimReplica

SOON_S = 30.0
StartServer = Callable[..., Awaitable[OpenAiServer]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts plain OpenAI servers: `await start_server(routes=[web.get(...)], key="k")`."""
    servers: list[OpenAiServer] = []

    async def start(routes: list[web.RouteDef] | None = None, key: str = "") -> OpenAiServer:
        servers.append(await OpenAiServer(routes or [], key).start())
        return servers[-1]

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def vllm() -> AsyncIterator[SimReplica]:
    """A server that is vLLM in all that can be seen."""
    replica = await SimReplica("theirs", 0, SimConfig()).start()
    yield replica
    await replica.kill()


@pytest.fixture
async def engine(vllm: SimReplica) -> AsyncIterator[ExternalEngine]:
    """The client of `vllm`."""
    theirs = server_at(vllm.info.url)
    engine = ExternalEngine(await theirs.start())
    yield engine
    await engine.close()
    await theirs.stop()


def server_at(url: str, **levers: Any) -> ExternalServer:
    config = EngineConfig.model_validate({"kind": "external", "url": url, "start_timeout_s": 3, **levers})
    return ExternalServer(config, replica_id="judge-0", group="judge")


async def test_a_vllm_server_is_found_to_take_weights(vllm: SimReplica) -> None:
    theirs = server_at(vllm.info.url)
    info = await theirs.start()
    assert (info.kind, info.model, info.url) == (EngineKind.EXTERNAL, "sim", vllm.info.url)
    assert (info.world_size, info.max_model_len, info.engine_version) == (1, 128, "0.32.0+sim")
    assert info.speaks_vllm
    assert info.takes_weights
    assert info.fetches  # its workers answer as ours do
    assert info.has("/pause")
    await theirs.check()
    await theirs.stop()


@pytest.mark.parametrize("answer", [[], [None], ["True"], [{"fetches": True}, None]])
async def test_a_vllm_without_our_worker_extension_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch, answer: list[Any]
) -> None:
    async def rpc(*_: object) -> web.Response:
        return web.json_response({"results": answer})

    monkeypatch.setattr(SimServer, "collective_rpc", rpc)
    replica = await SimReplica("theirs", 0, SimConfig()).start()
    theirs = server_at(replica.info.url)
    assert not (await theirs.start()).fetches
    await theirs.stop()
    await replica.kill()


async def test_a_plain_server_takes_no_weights_and_has_the_common_routes_alone(start_server: StartServer) -> None:
    theirs = server_at((await start_server()).url, max_model_len=77)
    info = await theirs.start()
    assert (info.model, info.world_size, info.max_model_len) == ("gpt", 0, 77)
    assert not info.speaks_vllm
    assert info.capabilities == {"/v1/models", "/v1/completions", "/v1/chat/completions"}
    await theirs.check()
    await theirs.stop()


async def test_a_server_without_openapi_is_tried_route_by_route(start_server: StartServer) -> None:
    async def size(_: web.Request) -> web.Response:
        return web.json_response({"world_size": 4})

    theirs = server_at((await start_server([web.get("/get_world_size", size), web.get("/health", size)])).url)
    info = await theirs.start()
    assert {"/get_world_size", "/health"} < info.capabilities
    assert info.world_size == 0, "weights need all their routes, not only the first"
    await theirs.stop()


def sglang_routes(dp_size: int = 1) -> list[web.RouteDef]:
    paths = ["/generate", "/health", "/model_info", "/pause_generation", "/server_info", "/update_weight_version"]
    paths += ["/init_weights_update_group", "/update_weights_from_distributed"]

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in paths}})

    async def server_info(_: web.Request) -> web.Response:
        info = {"version": "0.5.17", "tp_size": 2, "pp_size": 1, "dp_size": dp_size, "model_path": "m"}
        return web.json_response(info | {"served_model_name": "gpt"})

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": "4"})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    return [
        web.get("/openapi.json", openapi),
        web.get("/server_info", server_info),
        web.get("/model_info", model_info),
        web.get("/health", health),
    ]


async def test_an_sglang_server_is_found_and_spoken_to_as_such(start_server: StartServer) -> None:
    there = await start_server(sglang_routes(), "secret")
    there.listing["data"][0]["owned_by"] = "sglang"
    config = EngineConfig(kind=EngineKind.EXTERNAL, url=there.url, api_key=SecretStr("env:K"))
    theirs = ExternalServer(
        config.model_copy(update={"api_key": SecretStr("secret")}), replica_id="theirs-0", group="theirs"
    )
    info = await theirs.start()
    assert (info.kind, info.dialect, info.engine_version) == (EngineKind.EXTERNAL, Dialect.SGLANG, "0.5.17")
    assert (info.world_size, info.speaks_vllm) == (2, True)
    assert info.has("/pause")
    assert not info.has("/reset_prefix_cache"), "its /flush_cache is not there"
    engine = external_engine(info, "secret")
    assert isinstance(engine, SglangEngine)
    await engine.health(SOON_S)
    assert (await engine.weight_label(SOON_S)).version == 4
    await engine.close()
    await theirs.stop()


async def test_an_sglang_server_keeps_the_name_of_its_start_after_loading_a_version(
    start_server: StartServer,
) -> None:
    there = await start_server(sglang_routes())
    there.listing["data"][0] |= {"owned_by": "sglang", "id": "/store/v3"}
    theirs = server_at(there.url)
    assert (await theirs.start()).model == "gpt"
    await theirs.stop()


async def test_an_sglang_server_of_several_copies_takes_no_weights(start_server: StartServer) -> None:
    there = await start_server(sglang_routes(dp_size=2))
    there.listing["data"][0]["owned_by"] = "sglang"
    theirs = server_at(there.url)
    info = await theirs.start()
    assert (info.dialect, info.takes_weights) == (Dialect.SGLANG, False)
    await theirs.stop()


async def test_a_server_that_only_says_it_is_sglang_is_asked_as_any_other(start_server: StartServer) -> None:
    there = await start_server()
    there.listing["data"][0]["owned_by"] = "sglang"
    theirs = server_at(there.url)
    assert (await theirs.start()).dialect is Dialect.OPENAI
    await theirs.stop()


async def test_the_key_goes_with_every_request(start_server: StartServer) -> None:
    there = await start_server(key="secret")
    with pytest.raises(EngineStartFailed, match=r"answered 401.*is engine\.api_key right\?"):
        await server_at(there.url).start()
    config = EngineConfig.model_validate({"kind": "external", "url": there.url, "api_key": "env:JUDGE_KEY"})
    read = config.model_copy(update={"api_key": SecretStr("secret")})
    theirs = ExternalServer(read, replica_id="judge-0", group="judge")
    info = await theirs.start()
    assert "secret" not in repr(info)
    await theirs.stop()


async def test_a_model_that_is_not_there_is_told_with_those_that_are(start_server: StartServer) -> None:
    with pytest.raises(EngineStartFailed, match=r"has no model 'other' \(engine\.model\); it has gpt"):
        await server_at((await start_server()).url, model="other").start()


async def test_silence_is_a_failed_start_with_its_bound() -> None:
    with pytest.raises(EngineStartFailed, match=r"replica judge-0: .* within 0\.3 s \(engine\.start_timeout_s\)"):
        await server_at("http://127.0.0.1:1", start_timeout_s=0.3).start()


@pytest.mark.parametrize("listing", [{"hello": 1}, {"data": [1]}])
async def test_what_is_no_model_list_is_told(start_server: StartServer, listing: dict[str, Any]) -> None:
    there = await start_server()
    there.listing = listing
    with pytest.raises(EngineStartFailed, match="is this an OpenAI-compatible server"):
        await server_at(there.url).start()


async def test_the_check_fails_when_the_server_is_gone(start_server: StartServer) -> None:
    there = await start_server()
    theirs = server_at(there.url)
    await theirs.start()
    await there.stop()
    with pytest.raises(EngineUnreachable, match="judge-0"):
        await theirs.check()
    await theirs.stop()


async def test_a_plain_server_is_not_sent_the_fields_of_vllm(start_server: StartServer) -> None:
    there = await start_server()
    theirs = server_at(there.url)
    engine = ExternalEngine(await theirs.start())
    body = {"model": "gpt", "prompt": "a", "cache_salt": "v0", "return_token_ids": True}
    answer = await engine.generate("/v1/completions", body, SOON_S)
    assert answer["choices"][0]["text"] == "echo"
    chunks = [chunk async for chunk in engine.stream("/v1/completions", body, SOON_S)]
    assert chunks[0]["choices"][0]["text"] == "echo"
    assert there.bodies == [
        {"model": "gpt", "prompt": "a", "stream": False},
        {"model": "gpt", "prompt": "a", "stream": True},
    ]
    await engine.close()
    await theirs.stop()


async def test_a_route_that_is_not_there_is_refused_with_replica_and_route(start_server: StartServer) -> None:
    theirs = server_at((await start_server()).url)
    engine = ExternalEngine(await theirs.start())
    with pytest.raises(EngineRefused, match=r"replica judge-0: the external server at .* has no /pause"):
        await engine.pause(PauseMode.KEEP, clear_cache=False, timeout_s=SOON_S)
    assert (await engine.weight_label(SOON_S)).version == 0
    assert await engine.metrics(SOON_S) == ""
    await engine.close()
    await theirs.stop()


async def test_weights_that_the_gateway_brings_back_are_no_server_started_anew(vllm: SimReplica) -> None:
    theirs = server_at(vllm.info.url)
    info = await theirs.start()
    engine = external_engine(info)
    await engine.ask("POST", "/update_weight_version", {"new_version": "2"}, SOON_S)
    await theirs.check()
    await engine.undo_load(SOON_S)
    await theirs.check()
    await engine.label_weights("1", SOON_S, is_committed=True)
    await theirs.check()
    await engine.health(SOON_S)
    await engine.close()
    await theirs.stop()


async def test_weights_of_a_start_are_a_server_started_anew_until_it_is_described_anew(vllm: SimReplica) -> None:
    theirs = server_at(vllm.info.url)
    engine = ExternalEngine(await theirs.start())
    await theirs.check()
    await engine.ask("POST", "/update_weight_version", {"new_version": "3"}, SOON_S)
    await theirs.check()
    await engine.ask("POST", "/update_weight_version", {"new_version": "default"}, SOON_S)
    for _ in range(3):  # failures in a row after which Serve restarts a replica
        with pytest.raises(EngineFailed, match="were labelled '3', and are 'default' now: was it restarted"):
            await theirs.check()
    await theirs.start()
    await theirs.check()
    await engine.close()
    await theirs.stop()


async def test_an_earlier_version_that_comes_back_between_two_looks_is_no_server_started_anew(
    vllm: SimReplica,
) -> None:
    theirs = server_at(vllm.info.url)
    engine = external_engine(await theirs.start())
    for version in ("2", "1"):
        await engine.undo_load(SOON_S)
        await engine.label_weights(version, SOON_S, is_committed=True)
        await theirs.check()
        await engine.health(SOON_S)
    await engine.close()
    await theirs.stop()


async def test_a_server_that_is_replaced_after_an_update_is_found(vllm: SimReplica, engine: ExternalEngine) -> None:
    await engine.open_weight_group({"world_size": 2, "rank_offset": 1}, SOON_S)
    await engine.start_weight_update(SOON_S)
    await engine.finish_weight_update("1", SOON_S)
    await engine.health(SOON_S)
    vllm.label(0)
    with pytest.raises(EngineFailed, match=r"labelled '0', and were '1\?0': was it restarted"):
        await engine.health(SOON_S)


async def test_a_look_at_a_server_that_has_its_label_before_the_answer_is_heard_finds_no_other(
    engine: ExternalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await engine.weight_label(SOON_S)).version == 0
    set_label = ExternalEngine._set_label

    async def looked_at(asked: ExternalEngine, label: str, timeout_s: float) -> None:
        await set_label(asked, label, timeout_s)
        await asked.health(timeout_s)

    monkeypatch.setattr(ExternalEngine, "_set_label", looked_at)
    await engine.undo_load(SOON_S)
    await engine.label_weights("1", SOON_S, is_committed=True)
    await engine.health(SOON_S)


@pytest.mark.parametrize("label", ["0", "7", "1-0000000a", "default"])
@pytest.mark.parametrize("is_probed", [True, False])
async def test_a_version_that_was_not_given_here_is_another_server_behind_the_url(
    engine: ExternalEngine, label: str, is_probed: bool
) -> None:
    await engine.undo_load(SOON_S)
    if is_probed:
        await engine.health(SOON_S)
    await engine.label_weights("1", SOON_S, is_committed=True)
    await engine.ask("POST", "/update_weight_version", {"new_version": label}, SOON_S)
    with pytest.raises(EngineFailed, match=f"labelled '{label}', and were '1': was it restarted"):
        await engine.health(SOON_S)


async def test_the_version_that_a_server_came_with_is_the_one_that_it_has_to_report(engine: ExternalEngine) -> None:
    await engine.ask("POST", "/update_weight_version", {"new_version": "3"}, SOON_S)
    assert (await engine.weight_label(SOON_S)).version == 3
    await engine.health(SOON_S)
    await engine.ask("POST", "/update_weight_version", {"new_version": "0"}, SOON_S)
    with pytest.raises(EngineFailed, match="labelled '0', and were '3': was it restarted"):
        await engine.health(SOON_S)


async def test_a_look_that_an_update_overtakes_is_no_other_server(
    engine: ExternalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await engine.weight_label(SOON_S)).version == 0
    told = ExternalEngine._told_label

    async def overtaken(asked: ExternalEngine, timeout_s: float) -> str:
        monkeypatch.undo()
        await engine.undo_load(SOON_S)
        await engine.label_weights("1", SOON_S, is_committed=True)
        return await told(asked, timeout_s)

    monkeypatch.setattr(ExternalEngine, "_told_label", overtaken)
    await engine.health(SOON_S)
    await engine.health(SOON_S)


async def test_a_version_that_is_no_release_is_taken_for_the_latest(vllm: SimReplica) -> None:
    theirs = server_at(vllm.info.url)
    engine = ExternalEngine(replace(await theirs.start(), engine_version="nightly"))
    try:
        await engine.health(SOON_S)
    except EngineError as error:
        pytest.fail(str(error))
    await engine.close()
    await theirs.stop()
