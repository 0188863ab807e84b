"""The gateway's metrics page."""

import asyncio
import re

import pytest

from tests.rigs.rig import Rig, StartRig


async def page_of(rig: Rig) -> str:
    async with rig.client.get(rig.url + "/metrics") as response:
        return await response.text()


def value(page: str, sample: str) -> float:
    (found,) = re.findall(rf"^{re.escape('rollout_gateway_' + sample)} (\S+)$", page, re.MULTILINE)
    return float(found)


async def test_versions_ages_and_losses_are_told_by_labels_that_outlive_a_replica(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    page = await page_of(rig)
    assert value(page, 'replica_weight_version{replica="engine-0"}') == 1
    assert 0 <= value(page, "weight_age_seconds") < 60
    assert value(page, 'replicas_lost_total{group="engine"}') == 0
    assert value(page, "ready") == 1
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    await rig.add_replica("engine-abc", seed=2)
    await rig.until({"engine-1": "SERVING", "engine-abc": "SYNCING"})
    page = await page_of(rig)
    assert value(page, 'replica_weight_version{replica="engine-0"}') == 0, (
        "the successor, which has no store to load from"
    )
    assert value(page, 'replicas_lost_total{group="engine"}') == 1
    assert value(page, 'replicas_expected{group="engine"}') == 2
    assert 'replica="engine-abc"' not in page


async def test_times_of_creation_are_left_out_and_the_release_is_named(rig: Rig) -> None:
    await rig.complete([3], max_tokens=2)
    page = await page_of(rig)
    assert "_created" not in page
    assert re.search(r'^rollout_gateway_build_info\{version="[^"]+"\} 1.0$', page, re.MULTILINE)


async def test_a_page_that_is_none_costs_no_other_page(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def garbage(timeout_s: float) -> str:
        return 'vllm:num_requests_running{a="b" many'

    monkeypatch.setattr(rig.fleet.replicas[0].engine, "metrics", garbage)
    page = await page_of(rig)
    assert value(page, "ready") == 1
    assert 'replica="engine-1"' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_delivered_samples_are_counted_by_their_end_and_tokens_by_their_staleness(rig: Rig, stream: bool) -> None:
    await rig.open_group()
    await rig.update()
    body = {"model": "sim", "prompt": [3, 4], "max_tokens": 5, "ignore_eos": True, "stream": stream}
    async with rig.client.post(rig.url + "/v1/completions", json=body | {"n": 3}) as response:
        assert response.status == 200
        await response.read()
    page = await page_of(rig)
    assert value(page, 'completions_total{finish_reason="length",model="sim"}') == 3
    assert value(page, 'delivered_tokens_total{behind="0",model="sim"}') == 15
    rig.fleet.begin(5)  # as an update to version 5 under way does: what is delivered now is 4 versions behind
    async with rig.client.post(rig.url + "/v1/completions", json=body) as response:
        await response.read()
    assert value(await page_of(rig), 'delivered_tokens_total{behind="4",model="sim"}') == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_death_is_counted_as_a_retry_and_by_the_tokens_that_it_does_not_cost(
    start_rig: StartRig, stream: bool
) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01, "mean_tokens": 100_000})
    limits = {"max_tokens": 64, "ignore_eos": True, "n": 2}  # a short sample by itself restarts
    body = {"model": "sim", "stream": stream, "prompt": [3, 4], **limits}
    running = asyncio.create_task(rig.client.post(rig.url + "/v1/completions", json=body))
    await rig.begun(samples=2, tokens=8)
    page = await page_of(rig)
    assert (value(page, "kept_tokens_total"), value(page, 'retries_total{reason="failed"}')) == (0, 0)
    (busy,) = (replica for replica in rig.fleet.replicas if replica.load_samples)
    victim = next(one for one in rig.replicas if one.info.replica_id == busy.replica_id)
    rig.replicas.remove(victim)
    await victim.kill()
    rig.hurry()
    async with await running as response:
        assert response.status == 200
        await response.read()
    page = await page_of(rig)
    assert value(page, "kept_tokens_total") >= 8
    assert value(page, 'retries_total{reason="failed"}') + value(page, 'retries_total{reason="busy"}') > 0


async def test_a_batch_is_counted_by_its_time_and_its_tail_and_one_prompt_is_none(rig: Rig) -> None:
    await rig.complete([3])
    assert 'rollout_gateway_batch_seconds_count{model="sim"}' not in await page_of(rig)
    await rig.complete([[3], [4], [5]])
    page = await page_of(rig)
    assert value(page, 'batch_seconds_count{model="sim"}') == 1
    assert value(page, 'batch_tail_ratio_count{model="sim"}') == 1
    assert value(page, 'batch_tail_ratio_sum{model="sim"}') >= 1
