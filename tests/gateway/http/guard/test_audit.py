"""The audit log of admin requests."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs

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


async def test_a_line_that_the_disk_takes_in_part_goes_to_the_log(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "audit.jsonl"
    rig = await start_rig(1, gateway={"audit_file": str(file)})
    with capture_logs() as logged, monkeypatch.context() as full:
        full.setattr(os, "write", _disk_with_room_for(20))
        await rig.get("/is_paused")
        async with asyncio.timeout(10):
            while not logged:
                await asyncio.sleep(0.01)
    await rig.get("/get_world_size")
    await rig.stop_gateway()
    assert [(line["log_level"], line["path"]) for line in logged] == [("error", "/is_paused")]
    assert [line.get("path") for line in lines(file)] == [None, "/get_world_size"]


def _disk_with_room_for(num_bytes: int) -> Callable[[int, bytes], int]:
    write, left = os.write, num_bytes

    def part(file: int, content: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, content[:left])
        left -= written
        return written

    return part


async def test_without_a_file_the_lines_go_to_the_log(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    with capture_logs() as logged:
        await rig.get("/is_paused")
    (line,) = [entry for entry in logged if entry["event"] == "admin request"]
    assert (line["path"], line["key"], line["status"]) == ("/is_paused", "trusted network", 200)


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.audit_file"):
        Audit(str(tmp_path / "absent" / "audit.jsonl"))


async def test_the_first_line_needs_no_new_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "audit.jsonl"
    audit = Audit(str(file))

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def handler(request: web.Request) -> web.Response:
        return web.Response()

    monkeypatch.setattr(threading.Thread, "start", refused)
    await audit.noted(make_mocked_request("POST", "/pause"), lambda: "owner", handler)
    audit.close()
    assert [line["key"] for line in lines(file)[1:]] == ["owner"]
