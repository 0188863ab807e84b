"""Requests that a browser or a proxy on a trusted machine sends for others."""

import socket

import pytest

from engines.engine import Json
from tests.rigs.rig import Rig, StartRig

KEYS = {"inference_keys": ["reader"], "admin_keys": ["owner"]}
OWNER = {"Authorization": "Bearer owner"}


@pytest.fixture
async def rig(start_rig: StartRig) -> Rig:
    """A gateway that trusts loopback, as it does by default."""
    return await start_rig(1, gateway=KEYS)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Host": "[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example:8100"},  # a name that resolves to 127.0.0.1
        {"Host": "evillocalhost:8100"},
        {"Host": "evil.example:8100", "Origin": "http://evil.example:8100"},
        {"Content-Type": "text/plain"},
        {"X-Forwarded-For": "203.0.113.9"},
        {"X-Forwarded-Proto": "https"},
        {"x-forwarded-port": "443"},
        {"Forwarded": "for=203.0.113.9"},
    ],
    ids=lambda headers: " ".join(f"{name}={value}" for name, value in headers.items()),
)
async def test_a_page_of_another_site_or_a_proxy_pauses_nothing_without_a_key(rig: Rig, headers: Json) -> None:
    status, body = await rig.post("/pause", headers=headers, data=b"{}")
    assert status == 401
    assert "never counts for web pages of other sites and through proxies" in body["error"]["message"]
    assert (await rig.get("/status"))[1]["paused"] is False
    if "Content-Type" not in headers:
        assert (await rig.post("/pause", headers={**headers, **OWNER}))[0] == 200, "a key counts from anywhere"


@pytest.mark.parametrize("host", ["localhost:8100", "[::1]:8100", "127.0.0.1", socket.gethostname(), "10.1.2.3:8100"])
async def test_programs_on_the_machine_need_no_key_by_any_of_its_names(rig: Rig, host: str) -> None:
    assert (await rig.post("/pause", headers={"Host": host}))[0] == 200


async def test_the_dashboard_s_own_page_may_ask_for_its_figures(rig: Rig) -> None:
    own = {"Origin": rig.url, "Sec-Fetch-Site": "same-origin"}
    assert (await rig.get("/dashboard.json", headers=own))[0] == 200


async def test_health_without_a_key_says_up_or_not_and_no_more(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS | {"trusted_networks": []})
    assert await rig.get("/health") == (200, {"ready": True})
    assert "replicas" in (await rig.get("/health", headers={"Authorization": "Bearer reader"}))[1]
    rig.fleet.expect({"engine": 2})
    assert await rig.get("/health") == (503, {"ready": False})
