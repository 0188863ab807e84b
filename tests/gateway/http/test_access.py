"""Keys and trusted networks."""

import pytest
from pydantic import ValidationError

from engines.errors import NotAllowed
from gateway.config.schema import Config, GatewayConfig
from gateway.http.access import Access
from tests.rigs.rig import StartRig

KEYS = {"inference_keys": ["infer"], "admin_keys": ["admin"]}


def access(**config: object) -> Access:
    return Access(GatewayConfig.model_validate(KEYS | config))


def test_loopback_needs_no_key() -> None:
    access().check("127.0.0.1", None, admin=True)
    access().check("::1", None, admin=True)


def test_another_host_needs_a_key() -> None:
    with pytest.raises(NotAllowed, match="missing or wrong key"):
        access().check("10.0.0.7", None, admin=False)
    with pytest.raises(NotAllowed, match="missing or wrong key"):
        access().check("10.0.0.7", "Bearer guess", admin=False)


def test_an_inference_key_generates_but_does_not_touch_weights() -> None:
    access().check("10.0.0.7", "Bearer infer", admin=False)
    with pytest.raises(NotAllowed, match="admin key") as refused:
        access().check("10.0.0.7", "Bearer infer", admin=True)
    assert refused.value.known


def test_an_admin_key_opens_everything() -> None:
    access().check("10.0.0.7", "Bearer admin", admin=True)
    access().check("10.0.0.7", "Bearer admin", admin=False)


def test_a_trusted_network_needs_no_key() -> None:
    trusting = access(trusted_networks=["10.0.0.0/24"])
    trusting.check("10.0.0.7", None, admin=True)
    trusting.check("::ffff:10.0.0.7", None, admin=True)
    with pytest.raises(NotAllowed):
        trusting.check("10.0.1.7", None, admin=False)


def test_without_trusted_networks_loopback_needs_a_key_too() -> None:
    with pytest.raises(NotAllowed):
        access(trusted_networks=[]).check("127.0.0.1", None, admin=False)


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(NotAllowed):
        Access(GatewayConfig()).check("10.0.0.7", "Bearer ", admin=False)


@pytest.mark.parametrize("keys", [{}, {"admin_keys": ["a"]}, {"inference_keys": ["i"]}])
def test_a_port_open_to_other_hosts_without_keys_is_refused(keys: dict[str, list[str]]) -> None:
    with pytest.raises(ValidationError, match=r"gateway\.admin_keys"):
        Config.model_validate({"gateway": {"host": "0.0.0.0", **keys}})


async def test_the_server_asks_for_keys_on_every_route_but_health(start_rig: StartRig) -> None:
    rig = await start_rig(gateway=KEYS | {"trusted_networks": []})
    assert (await rig.get("/health"))[0] == 200
    assert (await rig.get("/v1/models"))[0] == 401
    assert (await rig.post("/start_weight_update", {}))[0] == 401
    infer = {"headers": {"Authorization": "Bearer infer"}}
    assert (await rig.get("/v1/models", **infer))[0] == 200
    status, reply = await rig.post("/start_weight_update", {}, **infer)
    assert (status, reply["error"]["type"]) == (403, "PermissionDeniedError")
