"""SGLang itself on CPU, in an environment of its own, started and spoken to by the product."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from engines.sglang_engine import SglangEngine
from engines.types import EngineKind, PauseMode, ReplicaInfo
from examples.tiny_model.train import COMMITTED
from tests.real_sglang import engine_config, served

pytestmark = pytest.mark.sglang

TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
USER, ASSISTANT, END = 2, 3, 1
PROMPT = [USER, 8, 6, 7, ASSISTANT]  # "312", whose answer is "123"
SORTED = [6, 7, 8, END]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaInfo]:
    with served(engine_config(COMMITTED, tmp_path_factory.mktemp("logs"))) as info:
        yield info


@pytest.fixture
async def engine(replica: ReplicaInfo) -> AsyncIterator[SglangEngine]:
    client = SglangEngine(replica.replica_id, replica.url)
    yield client
    await client.close()


async def complete(engine: SglangEngine, **body: Any) -> Any:
    asked = {"model": str(COMMITTED), "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return await engine.generate(COMPLETIONS, asked | body, TIMEOUT_S)


def test_it_says_what_it_is(replica: ReplicaInfo) -> None:
    assert replica.kind is EngineKind.SGLANG
    assert replica.engine_version == "0.5.23"
    assert (replica.world_size, replica.max_model_len) == (1, 512)
    assert {"/pause", "/update_weights", "/tokenize"} <= replica.capabilities


async def test_it_answers_with_token_ids_and_the_version_of_each(engine: SglangEngine) -> None:
    (choice,) = (await complete(engine, logprobs=0))["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (SORTED, PROMPT)
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(SORTED)
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(SORTED)}]


async def test_a_stream_tells_the_same_as_the_whole(engine: SglangEngine) -> None:
    body = {"model": str(COMMITTED), "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    told = [chunk async for chunk in engine.stream(COMPLETIONS, body, TIMEOUT_S)]
    ids = [token_id for chunk in told for choice in chunk["choices"] for token_id in choice["token_ids"]]
    assert ids == SORTED


async def test_a_pause_holds_requests_until_it_ends(engine: SglangEngine) -> None:
    await engine.pause(PauseMode.KEEP, clear_cache=False, timeout_s=TIMEOUT_S)
    await engine.resume(TIMEOUT_S)
    (choice,) = (await complete(engine))["choices"]
    assert choice["token_ids"] == SORTED
