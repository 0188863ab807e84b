"""Batches out of a pool: the first groups to end, and the others later, from their tokens, within their bounds."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from engines.config import SimConfig
from engines.errors import InvalidRequest
from engines.process.port import free_port
from engines.reading import server
from tests.rigs.forked_gateway import ForkedGateway
from tests.rigs.readers import Eager
from tests.rigs.rig import MAX_MODEL_LEN, Rig, SimReplica, StartRig
from trainer_client import (
    BlockingRolloutClient,
    BlockingRolloutPool,
    Rollout,
    RolloutClient,
    RolloutPool,
    SamplingParams,
)

WHOLE = 20
SAMPLING = SamplingParams(n=2, max_tokens=WHOLE, ignore_eos=True)
STALL = 6
"""A stalled engine ends short samples, which have 4 tokens, and stops the others here."""
LONG = [5, 6, 7]
SHORT = [*range(2, MAX_MODEL_LEN - 2)]  # the engine's context has room for 4 tokens more


@pytest.fixture
async def rig(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Two fast replicas. A group that is suspended has all that its engine told; without `Eager` it lacks what was made
    since its reader's last beat."""
    monkeypatch.setattr(server, "Joining", Eager)
    return await start_rig()


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(rig.url) as client:
        yield client


def stall(engines: Sequence[SimReplica]) -> None:
    for engine in engines:
        engine.scheduler.stall(after=STALL)


def lengths(batch: Sequence[Rollout]) -> dict[int, list[int]]:
    return {one.prompt_index: [len(completion.token_ids) for completion in one.completions] for one in batch}


def spans(rollout: Rollout) -> list[list[tuple[int, int | None, int | None]]]:
    return [[(span.version, span.start, span.end) for span in one.spans] for one in rollout.completions]


def made(engines: Sequence[SimReplica]) -> int:
    return sum(engine.generated_tokens for engine in engines)


async def kept(rig: Rig) -> int:
    return int((await rig.get("/status"))[1]["ledger"]["kept_bytes"])


async def until_idle(engines: Sequence[SimReplica]) -> None:
    async with asyncio.timeout(20):
        while any(engine.scheduler.running for engine in engines):
            await asyncio.sleep(0.01)


async def test_a_batch_has_the_first_groups_and_the_others_go_on_under_the_next_weights(
    rig: Rig, client: RolloutClient
) -> None:
    await rig.open_group()
    async with RolloutPool(client, [LONG, SHORT, SHORT, LONG, SHORT], SAMPLING, size=4) as pool:
        stall(rig.replicas)
        first = await pool.batch(2)
        assert lengths(first) == {1: [4, 4], 2: [4, 4]}
        await until_idle(rig.replicas)
        await rig.update()
        rig.hurry()
        before = made(rig.replicas)
        second = await pool.batch(3)
        assert lengths(second) == {0: [WHOLE] * 2, 3: [WHOLE] * 2, 4: [4, 4]}
        by_index = {one.prompt_index: one for one in second}
        for index in (0, 3):
            assert spans(by_index[index]) == [[(0, 0, STALL), (1, STALL, WHOLE)]] * 2
            assert by_index[index].attempts == 2
            assert [one.logprobs is not None and len(one.logprobs) for one in by_index[index].completions] == [
                WHOLE
            ] * 2
        assert spans(by_index[4]) == [[(1, 0, 4)]] * 2
        assert made(rig.replicas) - before == 4 * (WHOLE - STALL) + 2 * 4
        assert await pool.batch(1) == []
    assert await kept(rig) == 0


@pytest.mark.parametrize(("max_staleness", "updates", "goes_on"), [(1, 1, True), (1, 2, False), (2, 2, True)])
async def test_a_group_older_than_the_bound_begins_again_and_is_freed(
    rig: Rig, client: RolloutClient, max_staleness: int, updates: int, goes_on: bool
) -> None:
    await rig.open_group()
    pool = RolloutPool(client, [LONG, SHORT], SAMPLING, size=2, max_staleness=max_staleness)
    stall(rig.replicas)
    assert lengths(await pool.batch(1)) == {1: [4, 4]}
    await until_idle(rig.replicas)
    for _ in range(updates):
        await rig.update()
    rig.hurry()
    [group] = await pool.batch(1)
    assert lengths([group]) == {0: [WHOLE] * 2}
    oldest = [completion.oldest_version for completion in group.completions]
    assert oldest == [0 if goes_on else updates] * 2
    assert await kept(rig) == 0


async def test_need_of_n_samples_end_a_group(rig: Rig, client: RolloutClient) -> None:
    sampling = SamplingParams(n=4, max_tokens=100)  # these end by themselves, at any length
    async with RolloutPool(client, [LONG] * 6, sampling, size=3, need=2) as pool:
        batches = [await pool.batch(2) for _ in range(3)]
    assert sorted(one.prompt_index for batch in batches for one in batch) == list(range(6))
    assert all(len(one.completions) == 2 for batch in batches for one in batch)


async def test_a_group_that_fails_raises_and_leaves_the_others_in_the_pool(rig: Rig, client: RolloutClient) -> None:
    too_long = [5] * (MAX_MODEL_LEN + 1)
    pool = RolloutPool(client, [too_long, SHORT, LONG], SAMPLING, size=3)
    with pytest.raises(InvalidRequest, match=r"prompts\[0\]: "):
        await pool.batch(3)
    assert lengths(await pool.batch(3)) == {1: [4, 4], 2: [WHOLE] * 2}


async def test_a_batch_that_is_interrupted_ends_on_the_engines_and_is_made_again(
    rig: Rig, client: RolloutClient
) -> None:
    pool = RolloutPool(client, [LONG, LONG], SAMPLING, size=2)
    stall(rig.replicas)
    making = asyncio.create_task(pool.batch(2))
    await rig.begun(samples=4)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await until_idle(rig.replicas)
    rig.hurry()
    assert lengths(await pool.batch(2)) == {0: [WHOLE] * 2, 1: [WHOLE] * 2}


async def test_a_pool_that_is_closed_leaves_nothing_on_the_gateway(rig: Rig, client: RolloutClient) -> None:
    async with RolloutPool(client, [LONG, SHORT, LONG], SAMPLING, size=3) as pool:
        stall(rig.replicas)
        await pool.batch(1)
        assert await kept(rig) > 0
    assert await kept(rig) == 0


async def test_a_pool_makes_one_batch_at_a_time(rig: Rig, client: RolloutClient) -> None:
    pool = RolloutPool(client, [LONG] * 2, SAMPLING, size=2)
    stall(rig.replicas)
    making = asyncio.create_task(pool.batch(1))
    await rig.begun(samples=4)
    with pytest.raises(InvalidRequest, match="is being made"):
        await pool.batch(1)
    rig.hurry()
    assert len(await making) == 1


async def test_bad_bounds_are_refused(rig: Rig, client: RolloutClient) -> None:
    with pytest.raises(InvalidRequest, match="need = 3 must be 1 to n = 2"):
        RolloutPool(client, [LONG], SAMPLING, size=2, need=3)
    with pytest.raises(InvalidRequest, match="size = 0"):
        RolloutPool(client, [LONG], SAMPLING, size=0)
    with pytest.raises(InvalidRequest, match="max_staleness = 0 must be at least 1"):
        RolloutPool(client, [LONG], SAMPLING, size=2, max_staleness=0)
    with pytest.raises(InvalidRequest, match="num_groups = 1 is less than half of size = 3"):
        await RolloutPool(client, [LONG], SAMPLING, size=3, max_staleness=1).batch(1)
    with pytest.raises(InvalidRequest, match="num_groups = 3 must be 1 to size = 2"):
        await RolloutPool(client, [LONG], SAMPLING, size=2).batch(3)


async def test_a_pool_without_a_loop_does_the_same(rig: Rig) -> None:
    stall(rig.replicas)

    def first_batch() -> list[Rollout]:
        with (
            BlockingRolloutClient(rig.url) as client,
            BlockingRolloutPool(client, [LONG, SHORT, SHORT], SAMPLING, size=3) as pool,
        ):
            return pool.batch(2)

    assert lengths(await asyncio.to_thread(first_batch)) == {1: [4, 4], 2: [4, 4]}
    assert await kept(rig) == 0


class Restarts:
    """A gateway in a process of its own in front of one engine, with a client."""

    def __init__(self, engine: SimReplica, folder: Path, *, keeps: bool) -> None:
        port = free_port()
        ledger = folder / "ledger" if keeps else None
        self._gateway = ForkedGateway(port, engine.info.url, folder / "log", ledger)
        self.client = RolloutClient(f"http://127.0.0.1:{port}")

    async def __aenter__(self) -> "Restarts":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        self.kill()

    async def start(self) -> None:
        await asyncio.to_thread(self._gateway.start)
        await self.client.wait_ready(timeout_s=60)

    def kill(self) -> None:
        self._gateway.kill()


@pytest.fixture
async def engine() -> AsyncIterator[SimReplica]:
    replica = await SimReplica("engine-0", 0, SimConfig(decode_step_s=0.0, decode_step_per_seq_s=0.0)).start()
    yield replica
    await replica.kill()


@pytest.mark.parametrize("keeps", [True, False])
async def test_suspended_groups_go_on_after_a_killed_gateway_or_begin_again_where_it_kept_nothing(
    engine: SimReplica, tmp_path: Path, keeps: bool
) -> None:
    async with Restarts(engine, tmp_path, keeps=keeps) as gateway:
        pool = RolloutPool(gateway.client, [LONG, SHORT, LONG, SHORT], SAMPLING, size=3)
        stall([engine])
        assert lengths(await pool.batch(1)) == {1: [4, 4]}
        gateway.kill()
        await gateway.start()
        await until_idle([engine])
        before = made([engine])
        engine.hurry()
        assert lengths(await pool.batch(3)) == {0: [WHOLE] * 2, 2: [WHOLE] * 2, 3: [4, 4]}
        assert made([engine]) - before == 4 * (WHOLE - (STALL if keeps else 0)) + 2 * 4
