"""verl's client interface, answered by a gateway over simulated engines."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from engines.errors import EngineFailed, InvalidRequest
from tests.rigs.rig import MAX_MODEL_LEN, Rig, StartRig
from trainer_client.verl.llm_client import GatewayLLMClient
from trainer_client.verl.settings import Settings

pytestmark = pytest.mark.verl

PROMPT_LENGTH, RESPONSE_LENGTH = 16, 24
SAMPLING = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""As verl's agent loop workers send it."""
ENDLESS = {**SAMPLING, "ignore_eos": True}
PROMPT = (4, 5, 6)
ClientOf = Callable[..., GatewayLLMClient]


@pytest.fixture
async def client_of() -> AsyncIterator[ClientOf]:
    """Makes clients of a rig: `client_of(rig, version_of_step_0=1, rollout_timeout_s=1.0)`."""
    clients: list[GatewayLLMClient] = []

    def make(rig: Rig, *, version_of_step_0: int = 0, **settings: Any) -> GatewayLLMClient:
        rollout = SimpleNamespace(prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        known = Settings(url=rig.url, **settings)
        client = GatewayLLMClient(config, known, version_of_step_0=version_of_step_0, max_model_len=MAX_MODEL_LEN)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


async def ask(client: GatewayLLMClient, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Any:
    """A TokenOutput, as verl calls it."""
    return await client.generate("r", prompt_ids=list(prompt), sampling_params={**ENDLESS, **sampling})


async def test_tokens_come_with_log_probs_and_the_step_that_made_them(rig: Rig, client_of: ClientOf) -> None:
    await rig.open_group()
    for _ in range(3):
        await rig.update()
    output = await ask(client_of(rig, version_of_step_0=1))
    assert len(output.token_ids) == len(output.log_probs) == RESPONSE_LENGTH
    assert all(value <= 0 for value in output.log_probs)
    assert output.stop_reason == "completed"
    assert output.extra_fields == {"global_steps": 2, "min_global_steps": 2, "max_global_steps": 2}


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "length"),
    [
        (3, {}, RESPONSE_LENGTH),
        (PROMPT_LENGTH + 10, {}, RESPONSE_LENGTH - 10),  # a later turn: what is left of prompt and response together
        (PROMPT_LENGTH + RESPONSE_LENGTH + 5, {}, 1),
        (3, {"max_tokens": 5}, 5),
        (3, {"max_new_tokens": 7}, 7),
        (MAX_MODEL_LEN - 4, {"max_tokens": 50}, 4),
    ],
)
async def test_the_budget_is_that_of_verls_own_servers(
    rig: Rig, client_of: ClientOf, prompt_tokens: int, asked: dict[str, int], length: int
) -> None:
    output = await ask(client_of(rig), [4 + number % 9 for number in range(prompt_tokens)], **asked)
    assert len(output.token_ids) == length


async def test_a_completion_that_is_aborted_is_no_shorter_one(start_rig: StartRig, client_of: ClientOf) -> None:
    rig = await start_rig(1)
    asking = asyncio.create_task(ask(client_of(rig), max_tokens=80))
    await rig.begun()
    await rig.post("/pause?mode=abort")
    with pytest.raises(EngineFailed, match="was aborted, as by POST /pause"):
        await asking


async def test_a_client_reaches_its_workers_pickled(rig: Rig, client_of: ClientOf) -> None:
    client = client_of(rig)
    await ask(client)
    copy: GatewayLLMClient = pickle.loads(pickle.dumps(client))
    assert len((await ask(copy)).token_ids) == RESPONSE_LENGTH
    await copy.close()


async def test_images_are_refused_by_name(rig: Rig, client_of: ClientOf) -> None:
    with pytest.raises(InvalidRequest, match="image_data was given"):
        await client_of(rig).generate("r", prompt_ids=list(PROMPT), sampling_params=SAMPLING, image_data=["image"])
