"""Servers that somebody else runs: what is found out about them, and what they are asked."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

import sim.server
from engines.clients.external import ExternalEngine, ExternalServer, external_engine
from engines.clients.sglang_engine import SglangEngine
from engines.config import EngineConfig, SimConfig
from engines.errors import EngineFailed, EngineRefused, EngineStartFailed
from engines.types import Dialect, EngineKind, PauseMode
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
    assert info.takes_weights
    assert info.has("/pause")
    await theirs.check()
    await theirs.stop()


async def test_a_server_without_weight_routes_takes_no_weights_and_has_the_common_routes_alone(
    start_server: StartServer,
) -> None:
    theirs = server_at((await start_server()).url, max_model_len=77)
    info = await theirs.start()
    assert (info.model, info.world_size, info.max_model_len) == ("gpt", 0, 77)
    assert info.capabilities == {"/v1/models", "/v1/completions", "/v1/chat/completions"}
    await theirs.check()
    await theirs.stop()


def sglang_routes(dp_size: int = 1, version: str = "0.5.23") -> list[web.RouteDef]:
    paths = ["/generate", "/health", "/model_info", "/pause_generation", "/server_info", "/update_weight_version"]
    paths += ["/weights_checker"]

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in paths}})

    async def server_info(_: web.Request) -> web.Response:
        info = {"version": version, "tp_size": 2, "pp_size": 1, "dp_size": dp_size, "model_path": "m"}
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
    assert (info.kind, info.dialect, info.engine_version) == (EngineKind.EXTERNAL, Dialect.SGLANG, "0.5.23")
    assert info.world_size == 2
    assert info.has("/pause")
    assert not info.has("/reset_prefix_cache"), "its /flush_cache is not there"
    engine = external_engine(info, "secret")
    assert isinstance(engine, SglangEngine)
    await engine.health(SOON_S)
    assert (await engine.weight_label(SOON_S)).version == 4
    await engine.close()
    await theirs.stop()


@pytest.mark.parametrize(
    ("dp_size", "listed", "takes_weights"), [(1, "gpt", True), (1, "/store/v3", True), (2, "gpt", False)]
)
async def test_an_sglang_server_has_the_name_of_its_start_and_takes_weights_as_one_copy(
    start_server: StartServer, dp_size: int, listed: str, takes_weights: bool
) -> None:
    there = await start_server(sglang_routes(dp_size))
    there.listing["data"][0] |= {"owned_by": "sglang", "id": listed}
    theirs = server_at(there.url)
    info = await theirs.start()
    assert (info.dialect, info.model, info.takes_weights) == (Dialect.SGLANG, "gpt", takes_weights)
    await theirs.stop()


async def test_releases_before_those_that_are_updated_take_no_weights_and_serve(
    start_server: StartServer, vllm: SimReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = await start_server(sglang_routes(version="0.5.17"))
    there.listing["data"][0]["owned_by"] = "sglang"
    monkeypatch.setattr(sim.server, "VERSION", "0.27.1")
    for url, version in ((there.url, "0.5.17"), (vllm.info.url, "0.27.1")):
        info = await server_at(url).start()
        assert (info.engine_version, info.takes_weights) == (version, False)


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


@pytest.mark.parametrize(
    ("listing", "levers", "said"),
    [
        (None, {"model": "other"}, r"has no model 'other' \(engine\.model\); it has gpt"),
        (None, {"url": "http://127.0.0.1:1"}, r"replica judge-0: .* within 3 s \(engine\.start_timeout_s\)"),
        ({"hello": 1}, {}, "is this an OpenAI-compatible server"),
        ({"data": [1]}, {}, "is this an OpenAI-compatible server"),
        ({"data": [{"id": "gpt", "owned_by": "me"}]}, {}, "is neither vLLM nor SGLang"),
    ],
)
async def test_a_server_that_is_not_the_one_is_a_failed_start(
    start_server: StartServer, listing: dict[str, Any] | None, levers: dict[str, Any], said: str
) -> None:
    there = await start_server()
    there.listing = listing or there.listing
    with pytest.raises(EngineStartFailed, match=said):
        await server_at(**{"url": there.url} | levers).start()


async def test_a_route_that_is_not_there_is_refused_with_replica_and_route(start_server: StartServer) -> None:
    theirs = server_at((await start_server()).url)
    engine = ExternalEngine(await theirs.start())
    with pytest.raises(EngineRefused, match=r"replica judge-0: /pause.* answered 404"):
        await engine.pause(PauseMode.KEEP, clear_cache=False, timeout_s=SOON_S)
    assert (await engine.weight_label(SOON_S)).version == 0
    await engine.close()
    await theirs.stop()


@pytest.mark.parametrize("label", ["0", "7", "1-0000000a", "default"])
async def test_a_version_that_was_not_given_here_is_another_server_behind_the_url(
    engine: ExternalEngine, label: str
) -> None:
    await engine.label_weights("1", SOON_S, is_committed=True)
    await engine.ask("POST", "/update_weight_version", {"new_version": label}, SOON_S)
    with pytest.raises(EngineFailed, match=f"labelled '{label}', and were '1': was it restarted"):
        await engine.health(SOON_S)


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
