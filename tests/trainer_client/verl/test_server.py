"""The actor that verl's own asynchronous trainers ask, through verl's own clients, over simulated engines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

from engines.errors import ConfigError
from tests.rigs.rig import Rig, StartRig
from tests.trainer_client.verl.test_llm_client import ENDLESS, PROMPT, PROMPT_LENGTH, RESPONSE_LENGTH
from tests.trainer_client.verl.test_trainer import composed
from trainer_client.verl.actor import GatewayServer
from trainer_client.verl.settings import Settings

pytestmark = pytest.mark.verl

ServerOf = Callable[..., Awaitable[GatewayServer]]


class Remote:
    """An object of this process where verl has the handle of an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


class Balancer:
    """verl's, with one server."""

    def __init__(self, server: GatewayServer) -> None:
        self._server = Remote(server)

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def acquire_server(self, request_id: str) -> tuple[str, Remote]:
        return "server", self._server

    def release_server(self, server_id: str) -> None: ...


@pytest.fixture
async def server_of() -> AsyncIterator[ServerOf]:
    """Makes servers that have started: `await server_of(rig, is_first=False, abort_at_sync=True)`."""
    servers = []

    async def make(rig: Rig, *, is_first: bool = True, **settings: Any) -> GatewayServer:
        rollout = SimpleNamespace(prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH)
        servers.append(GatewayServer(Settings(url=rig.url, **settings), rollout, is_first))
        await servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        await server.close()


def client_of(server: GatewayServer, kind: type[LLMServerClient] = FullyAsyncLLMServerClient) -> Any:
    rollout = SimpleNamespace(prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH, name="gateway")
    config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return kind(config, Remote(Balancer(server)))


async def synced(servers: Sequence[GatewayServer], rig: Rig, global_steps: int) -> None:
    """As verl's checkpoint manager does it around the sending."""
    await asyncio.gather(*(server.abort_all_requests() for server in servers))
    assert [await server.execute_checkpoint_engine("prepare") for server in servers] == [{}] * len(servers)
    await asyncio.gather(*(server.update_weights(global_steps) for server in servers))
    await rig.update()
    await asyncio.gather(*(server.execute_checkpoint_engine("finalize") for server in servers))
    await asyncio.gather(*(server.resume_generation() for server in servers))


async def test_versions_are_told_as_verls_steps(rig: Rig, server_of: ServerOf) -> None:
    await rig.open_group()
    await rig.update()  # somebody's before
    server = await server_of(rig)
    for step in (10, 11):
        await synced([server], rig, step)
        output = await client_of(server).generate("r", prompt_ids=list(PROMPT), sampling_params=ENDLESS)
        assert len(output.token_ids) == len(output.log_probs) == RESPONSE_LENGTH
        steps = {name: output.extra_fields[f"{name}global_steps"] for name in ("", "min_", "max_")}
        assert steps == {"": step, "min_": step, "max_": step}


@pytest.mark.parametrize(
    ("kind", "abort_at_sync", "stop"),
    [(LLMServerClient, False, "completed"), (FullyAsyncLLMServerClient, True, "length")],
    ids=["kept", "resumed"],
)
async def test_what_a_sync_finds_under_way_goes_on_and_tells_its_oldest_and_newest_weights(
    start_rig: StartRig, server_of: ServerOf, kind: type[LLMServerClient], abort_at_sync: bool, stop: str
) -> None:
    rig = await start_rig(1)
    await rig.open_group()
    server = await server_of(rig, abort_at_sync=abort_at_sync)
    sampling = {**ENDLESS, "max_tokens": 80}
    asking = asyncio.create_task(
        client_of(server, kind).generate("r", prompt_ids=list(PROMPT), sampling_params=sampling)
    )
    await rig.begun()
    await synced([server], rig, 1)
    rig.hurry()
    output = await asking
    assert (output.stop_reason, len(output.token_ids), len(output.log_probs)) == (stop, 80, 80)
    steps = [output.extra_fields[f"{name}_global_steps"] for name in ("min", "max")]
    assert steps == [0, 1]


async def test_the_pause_of_a_run_that_ended_in_a_sync_is_taken_back(rig: Rig, server_of: ServerOf) -> None:
    server = await server_of(rig, abort_at_sync=True)
    await server.abort_all_requests()
    assert (await rig.get("/is_paused"))[1] == {"is_paused": True}
    await server_of(rig, abort_at_sync=True)
    assert (await rig.get("/is_paused"))[1] == {"is_paused": False}


@pytest.mark.parametrize(
    ("overrides", "mode", "said"),
    [
        ([], RolloutMode.HYBRID, r"set actor_rollout_ref\.hybrid_engine=False"),
        ([], RolloutMode.STANDALONE, r"checkpoint_engine\.backend=naive does not send weights to a gateway"),
        (
            ["actor_rollout_ref.rollout.checkpoint_engine.backend=gateway"],
            RolloutMode.STANDALONE,
            r"no rollout URL: give \+actor_rollout_ref\.rollout\.checkpoint_engine\.engine_kwargs\.gateway\.url=",
        ),
    ],
)
async def test_a_replica_that_cannot_be_names_the_key(
    overrides: list[str], mode: RolloutMode, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLOUT_URL", raising=False)
    config = composed(["actor_rollout_ref.rollout.name=gateway", *overrides]).actor_rollout_ref
    replica = get_rollout_replica_class("gateway")(0, config.rollout, config.model)
    replica.rollout_mode = mode
    with pytest.raises(ConfigError, match=said):
        await replica.launch_servers()
