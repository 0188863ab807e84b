"""A rollout goes to replicas that can do what its request asks, however busy they are."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from engines.config import EngineConfig
from tests.material.adapters import write_adapter
from tests.rigs.openai_server import OpenAiServer
from tests.rigs.rig import Json, Rig, StartRig, described

TOKENS = "/inference/v1/generate"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
FEATURES = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}


class ImageServer:
    """A plain server that also serves vLLM's route for token ids, as one with images does; it first refuses `busy`."""

    def __init__(self) -> None:
        self.bodies: list[Json] = []
        self.busy = 0
        routes = [web.get("/openapi.json", self._paths), web.post(TOKENS, self._generate)]
        routes.append(web.get("/version", self._version))
        self.server = OpenAiServer(routes, "")
        self.server.listing["data"][0] |= {"id": "sim", "owned_by": "vllm"}

    async def _paths(self, _: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in (TOKENS, "/v1/completions", "/version")}})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _generate(self, request: web.Request) -> web.Response:
        if self.busy:
            self.busy -= 1
            return web.json_response({"error": "no room"}, status=429, headers={"Retry-After": "1"})
        self.bodies.append(await request.json())
        choice = {"index": 0, "token_ids": [7], "finish_reason": "length", "logprobs": None}
        return web.json_response({"request_id": "a", "choices": [choice], "usage": {"completion_tokens": 1}})


@pytest.fixture
async def images() -> AsyncIterator[ImageServer]:
    server = ImageServer()
    await server.server.start()
    yield server
    await server.server.stop()


async def joined(start_rig: StartRig, url: str) -> Rig:
    """A simulated replica without the route, and the external server at `url`, of one model."""
    rig = await start_rig(1)
    [ours] = rig.fleet.replicas
    ours.info = replace(ours.info, capabilities=ours.info.capabilities - {TOKENS})
    rig.external = [
        await described(EngineConfig.model_validate({"kind": "external", "url": url}), "theirs-0", "engine")
    ]
    await rig.until({"engine-0": "SERVING", "theirs-0": "SERVING"})
    return rig


@pytest.mark.parametrize("media", [{"content_parts": [IMAGE]}, {"features": FEATURES}])
async def test_token_ids_with_images_go_to_the_replica_that_takes_them_and_arrive_whole(
    start_rig: StartRig, images: ImageServer, media: Json
) -> None:
    rig = await joined(start_rig, images.server.url)
    for _ in range(6):
        status, reply = await rig.post(TOKENS, {"token_ids": [5], "sampling_params": {"max_tokens": 1}} | media)
        assert (status, reply["choices"][0]["token_ids"]) == (200, [7])
    assert len(images.bodies) == 6
    assert all(body.items() >= media.items() for body in images.bodies)
    assert rig.replicas[0].generated_tokens == 0


async def test_images_wait_for_a_replica_that_is_away_rather_than_fail_on_one_that_cannot(
    start_rig: StartRig, images: ImageServer
) -> None:
    rig = await joined(start_rig, images.server.url)
    images.busy = 1
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}, "content_parts": [IMAGE]}
    assert (await rig.post(TOKENS, body))[0] == 200
    assert images.busy == 0


async def test_token_ids_wait_for_an_engine_that_is_missing_and_may_take_them(start_rig: StartRig) -> None:
    rig = await start_rig(2)
    other, only = rig.fleet.replicas
    other.info = replace(other.info, capabilities=frozenset())
    dead = next(replica for replica in rig.replicas if replica.info.replica_id == only.replica_id)
    await dead.kill()
    await rig.until({other.replica_id: "SERVING"})
    asking = asyncio.create_task(rig.post(TOKENS, {"token_ids": [5], "sampling_params": {"max_tokens": 1}}))
    await rig.in_line()
    await rig.add_replica(only.replica_id)
    assert (await asking)[0] == 200


async def test_rollouts_of_an_adapter_go_to_the_replicas_that_hold_it(start_rig: StartRig, tmp_path: Path) -> None:
    engine = {"kind": "sim", "model": "sim", "num_replicas": 2, "enable_lora": True, "max_loras": 2}
    rig = await start_rig(engine=engine)
    status, text = await rig.load("policy-v1", write_adapter(tmp_path / "v1"))
    assert status == 200, text
    first, second = rig.fleet.replicas
    second.adapters.clear()
    for _ in range(6):
        await rig.complete([5, 6], model="policy-v1")
    assert (first.placed, second.placed) == (6, 0)
