"""The examples of docs/agents.md, run against a gateway."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from scripts.docs.pages import ROOT
from tests.rigs.rig import Rig

TOOLS = ("bash", "curl", "jq")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
async def test_the_commands_of_the_page_do_what_it_says(rig: Rig, tmp_path: Path) -> None:
    script = "set -euo pipefail\n" + "\n".join(blocks("agents.md", "sh")).replace("URL/", f"{rig.url}/")
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", script, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(shell.communicate(), 60)
    assert shell.returncode == 0, output.decode()
    assert output.decode().split() == ["true"] * 7
