"""The audit log of admin requests."""

import json
from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.http.guard.audit import Audit
from tests.rigs.rig import Json, StartRig

KEYS = {"inference_keys": ["reader-value"], "admin_keys": ["owner-value"], "trusted_networks": []}


def lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_each_admin_request_has_a_line_with_the_keys_name_and_no_key(start_rig: StartRig, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    rig = await start_rig(1, gateway=KEYS | {"audit_file": str(file)})
    for key in ("owner-value", "reader-value", "guess"):
        await rig.post("/v1/load_lora_adapter", {}, headers={"Authorization": f"Bearer {key}"})
    await rig.get("/is_paused", headers={"Authorization": "Bearer owner-value"})
    await rig.get("/v1/models", headers={"Authorization": "Bearer reader-value"})
    await rig.stop_gateway()
    started, *found = lines(file)
    assert started["event"] == "gateway started"
    assert [(line["method"], line["path"], line["key"], line["status"]) for line in found] == [
        ("POST", "/v1/load_lora_adapter", "gateway.admin_keys[0]", 400),
        ("POST", "/v1/load_lora_adapter", "gateway.inference_keys[0]", 403),
        ("POST", "/v1/load_lora_adapter", None, 401),
        ("GET", "/is_paused", "gateway.admin_keys[0]", 200),
    ]
    assert {line["peer"] for line in found} == {"127.0.0.1"}
    assert "value" not in file.read_text()
    assert "guess" not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_file_that_is_moved_away_is_made_again(start_rig: StartRig, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    rig = await start_rig(1, gateway={"audit_file": str(file)})
    file.rename(tmp_path / "audit.jsonl.1")
    await rig.get("/is_paused")
    await rig.stop_gateway()
    assert [line["key"] for line in lines(file)] == ["trusted network"]


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.audit_file"):
        Audit(str(tmp_path / "absent" / "audit.jsonl"))
