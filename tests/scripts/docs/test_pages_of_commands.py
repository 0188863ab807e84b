"""The examples of docs/submissions.md and docs/agents.md, run against a gateway."""

import asyncio
import re
import shutil
from pathlib import Path

import aiohttp
import pytest

from scripts.docs.pages import ROOT
from tests.rigs.rig import Rig, StartRig

TOOLS = ("bash", "curl", "jq", "cmp")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
@pytest.mark.parametrize(("page", "checks"), [("submissions.md", 8), ("agents.md", 7)])
async def test_the_commands_of_a_page_do_what_it_says(
    start_rig: StartRig, tmp_path: Path, page: str, checks: int
) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01})  # no rollout ends before a page's deadline of 1 ms
    script = "set -euo pipefail\n" + "\n".join(blocks(page, "sh")).replace("URL/", f"{rig.url}/")
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", script, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(shell.communicate(), 60)
    assert shell.returncode == 0, output.decode()
    assert output.decode().split() == ["true"] * checks


async def test_the_reader_of_the_page_reads_msgpack(rig: Rig) -> None:
    names: dict[str, object] = {}
    [code] = blocks("submissions.md", "python")
    exec(code, names)
    headers = {"Accept": "application/msgpack"}
    asked = {"groups": [{"prompt": [5, 6, 7], "n": 2}]}
    async with (
        aiohttp.ClientSession() as client,
        client.post(rig.url + "/v1/rollouts", json=asked, headers=headers) as response,
    ):
        events = list(names["events"](await response.read()))  # type: ignore[operator]
    assert [event["type"] for event in events].count("sample") == 2
    assert [len(event["token_ids"]) for event in events if event["type"] == "sample"] == [16, 16]
