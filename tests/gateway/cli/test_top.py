"""The dashboard in a terminal."""

import asyncio
import io

import pytest
from rich.console import Console

from engines.errors import GatewayUnreachable, NotAllowed
from engines.process.port import free_port
from gateway.cli.rollout_url import ask
from gateway.cli.top import sparkline, top
from tests.rigs.rig import Rig, StartRig


async def printed(rig: Rig, key: str = "") -> str:
    out = io.StringIO()
    await asyncio.to_thread(top, Console(file=out, width=200), rig.url, key, once=True)
    return out.getvalue()


async def test_top_shows_versions_replicas_and_events(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    text = await printed(rig)
    assert "1 of 2 replicas serve" in text
    assert "weight version 1" in text
    assert "MISSING" in text
    assert "engine-0 was lost" in text
    assert "last update: version 1 committed" in text
    assert "-> LOST" in text


async def test_top_counts_restarts(rig: Rig) -> None:
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    await rig.add_replica("engine-abc", seed=2)
    await rig.until({"engine-1": "SERVING", "engine-abc": "SERVING"})
    lines = (await printed(rig)).splitlines()
    (head,) = (line for line in lines if "restarts" in line)
    (successor,) = (line for line in lines if line.startswith("engine-0"))
    place = head.index("restarts")
    assert successor[place : place + len("restarts")].strip() == "1"


async def test_top_without_its_key_or_its_gateway_says_so(start_rig: StartRig) -> None:
    keys = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}
    rig = await start_rig(1, gateway=keys)
    with pytest.raises(NotAllowed, match="wants a key: give --api-key"):
        await printed(rig)
    with pytest.raises(NotAllowed, match="wants another key"):
        await printed(rig, "wrong")
    with pytest.raises(NotAllowed, match="wants an admin key"):
        await asyncio.to_thread(ask, rig.url, "/traces/x", "reader")
    assert "1 of 1 replicas serve" in await printed(rig, "reader")
    with pytest.raises(GatewayUnreachable, match="no gateway answers at"):
        top(Console(file=io.StringIO()), f"http://127.0.0.1:{free_port()}", "", once=True)


def test_a_sparkline_is_as_high_as_its_highest_value() -> None:
    assert sparkline([0, 4, 8]) == " ▄█"
    assert sparkline([0, 0]) == "  "
    assert sparkline([]) == ""
