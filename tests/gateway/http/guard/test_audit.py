"""The log of admin requests."""

import pytest

from tests.rigs.rig import StartRig

KEYS = {"inference_keys": ["reader-value"], "admin_keys": ["owner-value"], "trusted_networks": []}


async def test_each_admin_request_has_a_line_with_the_keys_name_and_no_key(
    start_rig: StartRig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = await start_rig(1, gateway=KEYS)
    for key in ("owner-value", "reader-value", "guess"):
        await rig.post("/v1/load_lora_adapter", {}, headers={"Authorization": f"Bearer {key}"})
    await rig.get("/is_paused", headers={"Authorization": "Bearer owner-value"})
    await rig.get("/v1/models", headers={"Authorization": "Bearer reader-value"})
    told = capsys.readouterr().out
    found = [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in told.splitlines()]
    assert [(line["method"], line["path"], line["key"], line["status"]) for line in found if "key" in line] == [
        ("POST", "/v1/load_lora_adapter", "gateway.admin_keys[0]", "400"),
        ("POST", "/v1/load_lora_adapter", "gateway.inference_keys[0]", "403"),
        ("POST", "/v1/load_lora_adapter", "None", "401"),
        ("GET", "/is_paused", "gateway.admin_keys[0]", "200"),
    ]
    assert "value" not in told
    assert "guess" not in told
