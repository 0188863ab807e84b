"""The gateway's metrics page."""

import re

from tests.rigs.rig import Rig


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
    assert value(page, 'replicas_lost{group="engine"}') == 0
    assert value(page, "ready") == 1
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    await rig.add_replica("engine-abc", seed=2)
    await rig.until({"engine-1": "SERVING", "engine-abc": "SYNCING"})
    page = await page_of(rig)
    assert value(page, 'replica_weight_version{replica="engine-0"}') == 0, (
        "the successor, which has no store to load from"
    )
    assert value(page, 'replicas_lost{group="engine"}') == 1
    assert value(page, 'replicas_expected{group="engine"}') == 2
    assert 'replica="engine-abc"' not in page


async def test_times_of_creation_are_left_out_and_the_release_is_named(rig: Rig) -> None:
    await rig.complete([3], max_tokens=2)
    page = await page_of(rig)
    assert "_created" not in page
    assert re.search(r'^rollout_gateway_build_info\{version="[^"]+"\} 1.0$', page, re.MULTILINE)
