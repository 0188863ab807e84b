"""The dashboard: its JSON, and what a browser makes of it."""

import asyncio
import re
import time
from dataclasses import replace

from engines.types import EngineStart
from gateway.fleet.history import Timeline
from tests.rigs.browser import page_of
from tests.rigs.rig import Rig, StartRig

KEYS = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}


async def test_the_json_has_the_status_the_engines_load_and_the_batch_under_way(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01, "mean_tokens": 100_000})
    idle = (await rig.get("/dashboard.json"))[1]
    assert idle["status"]["replicas_expected"] == 2
    assert idle["batch"] is None
    running = asyncio.create_task(rig.complete([[3], [4]], max_tokens=4000, ignore_eos=True, n=2))
    async with asyncio.timeout(20):
        while not (found := (await rig.get("/dashboard.json"))[1])["batch"] or not found["series"]["tokens_per_s"][-1]:
            await asyncio.sleep(0.05)
    assert found["batch"]["in_flight"] == 4
    assert sum(load["running"] for load in found["engines"].values()) == 4
    assert found["staleness"] == [[0, 4]]
    assert {len(values) for values in found["series"].values()} == {len(found["series"]["at"])}
    rig.hurry()
    await running


async def test_the_timeline_has_the_states_of_a_weight_update(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    (row, _) = (await rig.get("/dashboard.json"))[1]["timeline"]
    assert row["replica"] == "engine-0"
    states = [(state, version) for _, _, state, version in row["runs"]]
    assert states[0] == ("SERVING", 0)
    assert ("UPDATING", None) in states
    assert states[-1] == ("SERVING", 1)
    ends = [end for _, end, _, _ in row["runs"]]
    assert ends == [begun for begun, _, _, _ in row["runs"][1:]] + [None]


async def test_a_lost_replica_ends_its_run_and_is_forgotten_after_ten_minutes(rig: Rig) -> None:
    now = 0.0
    timeline = Timeline(rig.fleet, now=lambda: now)
    timeline.look()
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    lost, kept = timeline.report()
    assert lost["runs"][-1][1] == 0.0
    assert kept["runs"][-1][1] is None
    now = 601.0
    assert [row["replica"] for row in timeline.report()] == ["engine-1"]


async def test_the_page_is_open_and_its_json_needs_a_key(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS)
    async with rig.client.get(rig.url + "/dashboard") as page:
        assert page.status == 200
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert not re.search(r'(src|href)="(?!data:)', await page.text()), "the page fetches nothing from elsewhere"
    assert (await rig.get("/dashboard.json"))[0] == 401
    assert (await rig.get("/dashboard.json", headers={"Authorization": "Bearer reader"}))[0] == 200


async def test_a_browser_shows_every_replica_and_a_row_for_a_missing_one(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    page = await page_of(rig.url + "/dashboard")
    assert 'data-shown="yes"' in page
    assert '<b id="version">1</b>' in page
    assert '<b id="serving">1 of 2</b>' in page
    (rows,) = re.findall(r'<tbody id="replicas">(.*?)</tbody>', page)
    assert rows.count("<tr") == 2
    (heads,) = re.findall(r"<thead>(<tr>\s*<th>Replica</th>.*?)</thead>", page, re.DOTALL)
    assert "Restarts" in heads
    assert rows.count("<td") == 2 * heads.count("<th")
    assert "MISSING" in rows
    assert "engine-0 was lost" in rows
    (timeline,) = re.findall(r'<div id="timeline">(.*?)</div>', page)
    assert timeline.count("var(--UPDATING)") >= 1
    (events,) = re.findall(r'<ol id="events">(.*?)</ol>', page)
    assert "-&gt; LOST" in events


async def test_a_browser_shows_the_phase_of_an_engine_that_starts_and_the_last_start_of_one_that_serves(
    rig: Rig,
) -> None:
    served = rig.fleet.replicas[1]
    served.info = replace(served.info, started=109.5, phases=(("importing", 100.0), ("warming up", 108.0)))
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    start = EngineStart(replica_id="engine-x", group="engine", phases=(("loading weights 3/8", time.time() - 4),))

    async def tell() -> None:
        while True:
            rig.fleet.starts.tell(start)
            await asyncio.sleep(1)

    telling = asyncio.create_task(tell())
    page = await page_of(rig.url + "/dashboard")
    telling.cancel()
    (rows,) = re.findall(r'<tbody id="replicas">(.*?)</tbody>', page)
    assert 'title="importing 8.0 s, warming up 1.5 s">start 9.5 s' in rows
    assert "STARTING" in rows
    assert "MISSING" not in rows
    assert "engine-x starts: loading weights 3/8 for " in rows


async def test_a_browser_asks_for_a_key_where_the_gateway_wants_one(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS)
    page = await page_of(rig.url + "/dashboard")
    assert "This gateway needs a key" in page
    assert 'data-shown="yes"' not in page
