"""Submissions through the client: each completion once, whatever happens to connections and gateways."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.errors import DeadlineExceeded, GatewayUnreachable, IdTaken, InvalidRequest, RolloutGatewayError
from gateway.api import error_of
from tests.rigs.calls import until
from tests.rigs.rig import Rig
from trainer_client import RolloutClient, SamplingParams, http, retries, submission
from trainer_client.http import GatewayHttp
from trainer_client.results import Completion

SAMPLING = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, number + 7] for number in range(6)]
ALL = [(prompt, sample) for prompt in range(6) for sample in range(2)]


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(rig.url) as client:
        yield client


def names(completions: list[Completion]) -> list[tuple[int, int]]:
    return [(completion.prompt_index, completion.sample_index) for completion in completions]


async def test_each_completion_comes_once_with_its_arrays(rig: Rig, client: RolloutClient) -> None:
    asked = client.submit([*PROMPTS[:5], "abc"], SAMPLING)
    completions = [completion async for completion in asked]
    assert sorted(names(completions)) == ALL
    for completion in completions:
        assert (completion.token_ids.dtype, len(completion.token_ids)) == (np.dtype(np.int32), 8)
        assert completion.logprobs is not None
        assert (completion.logprobs.dtype, len(completion.logprobs)) == (np.dtype(np.float32), 8)
        assert (completion.finish_reason, completion.oldest_version) == ("length", 0)
    assert asked.outcomes == dict.fromkeys(range(6), "delivered")
    assert (await rig.get("/status"))[1]["ledger"]["kept_bytes"] == 0


async def test_a_trainer_that_restarts_under_its_id_gets_the_rest(rig: Rig, client: RolloutClient) -> None:
    first: list[Completion] = []
    async for completion in client.submit(PROMPTS, SAMPLING, submission_id="step"):
        first.append(completion)
        break
    rest = [one async for one in client.submit(PROMPTS, SAMPLING, submission_id="step")]
    assert sorted(names(rest)) == ALL  # the first was not acked: its loop never came back
    assert sum(replica.generated_tokens for replica in rig.replicas) == 12 * 8
    with pytest.raises(IdTaken):
        _ = [one async for one in client.submit(PROMPTS[:1], SAMPLING, submission_id="step")]


async def test_a_trainer_that_restarts_after_its_last_ack_gets_nothing_more_and_does_not_wait(
    client: RolloutClient,
) -> None:
    for expected in (ALL, []):
        asked = client.submit(PROMPTS, SAMPLING, submission_id="step", timeout_s=20.0)
        assert sorted(names([one async for one in asked])) == expected


async def test_groups_that_fail_are_named_and_the_others_delivered(rig: Rig, client: RolloutClient) -> None:
    for replica in rig.replicas:
        replica.inject(status=422)
    asked = client.submit(PROMPTS[:1], SAMPLING)
    assert [one async for one in asked] == []
    assert asked.outcomes == {0: "failed"}
    assert isinstance(asked.failures[0], InvalidRequest)


async def test_a_submission_that_is_late_raises_in_time(rig: Rig, client: RolloutClient) -> None:
    async def read() -> None:
        _ = [one async for one in client.submit(PROMPTS, SAMPLING, timeout_s=1.0)]

    reading = asyncio.create_task(read())
    await rig.begun(samples=1)
    with pytest.raises(DeadlineExceeded, match="timeout_s = 1"):
        await reading


async def test_a_cancelled_submission_ends(rig: Rig, client: RolloutClient) -> None:
    asked = client.submit(PROMPTS, SAMPLING, submission_id="step")

    async def read() -> list[Completion]:
        return [one async for one in asked]

    reading = asyncio.create_task(read())
    await rig.begun(samples=12)
    await asked.cancel([0])
    await asked.cancel()
    assert await reading == []
    assert set(asked.outcomes.values()) == {"cancelled"}


async def test_a_silent_connection_is_made_again_and_nothing_comes_twice(
    rig: Rig, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_SILENT_S", 0.1)
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.01)
    opened: list[str] = []
    streamed = client._http.streamed

    def counted(method: str, *arguments: Any) -> AsyncGenerator[bytes]:
        opened.append(method)
        return streamed(method, *arguments)

    monkeypatch.setattr(client._http, "streamed", counted)

    async def read() -> list[Completion]:
        return [one async for one in client.submit(PROMPTS, SAMPLING, submission_id="step")]

    reading = asyncio.create_task(read())
    await rig.begun(samples=12)
    await until(lambda: len(opened) >= 4)
    rig.hurry()
    assert sorted(names(await reading)) == ALL


# Failures between the client and the gateway


def frame(event: dict[str, Any]) -> bytes:
    content = msgspec.msgpack.encode(event)
    return bytes([0]) + len(content).to_bytes(4, "big") + content


def head(*, ended: bool = False) -> bytes:
    return frame({"type": "submission", "ended": ended})


def sample(group: int) -> bytes:
    fields = {"token_ids": np.array([7], np.int32).tobytes(), "logprobs": None, "text": "7", "finish_reason": "stop"}
    return frame({"type": "sample", "cursor": group + 1, "group": group, "sample": 0, **fields})


END = frame({"type": "end", "cursor": 9})
BROKEN = GatewayUnreachable("broken")


class Played(GatewayHttp):
    """A gateway that answers each connection with its blocks, and raises what is among them; `acks` are raised too."""

    def __init__(
        self, *connections: Sequence[bytes | RolloutGatewayError], acks: RolloutGatewayError | None = None
    ) -> None:
        super().__init__("http://played", "")
        self._connections = iter(connections)
        self._acks = acks

    async def streamed(self, *_: Any) -> AsyncGenerator[bytes]:
        for block in next(self._connections):
            if isinstance(block, RolloutGatewayError):
                raise block
            yield block

    async def call(self, *_: Any, **__: Any) -> dict[str, Any]:
        if self._acks is not None:
            raise self._acks
        return {}


async def groups_of(gateway: Played) -> list[int]:
    asked = submission.Submission(gateway, {"groups": []}, timeout_s=60.0, attempts=5, outage_s=60.0)
    return [one.prompt_index async for one in asked]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(submission, "_ACK_EVERY_S", -1.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_submission_is_asked_for_again_where_a_prompt_is(status: int) -> None:
    refused = error_of(status, "<html>")
    gateway = Played([refused], [head(), sample(0), BROKEN], [refused], [head(), sample(1), END])
    assert await groups_of(gateway) == [0, 1]


@pytest.mark.usefixtures("quick")
async def test_a_submission_that_had_ended_is_read_to_its_end() -> None:
    begun = [head(ended=True), sample(0)]
    whole = [head(ended=True), sample(1), END]
    assert await groups_of(Played([*begun, BROKEN], [], whole)) == [0, 1]
    assert await groups_of(Played(begun, whole)) == [0, 1]
    assert await groups_of(Played(begun, [head(ended=True)])) == [0]  # another reader has acked the rest
