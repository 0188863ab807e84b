"""`rollout-gateway vllm-serve` as docs/trl.md has it for the laptop: Ray, Serve and two real vLLM replicas on CPU."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from engines.process.port import free_port
from tests.rigs.shell import NAME

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.ray]

ROOT = Path(__file__).parents[3]
MODEL = "examples/tiny_model/digit-sort"
START_S, STOP_S = 240.0, 90.0


def command() -> list[str]:
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    words = shlex.split(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].replace("\\\n", " "))
    assert words[:2] == ["rollout-gateway", "vllm-serve"]
    return [str(Path(sys.executable).with_name(words[0])), *words[1:]]


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_it_serves_until_it_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    words = command()
    words[words.index("--port") + 1] = str(port)
    words += ["--serve.http_port", str(free_port()), "--engine.log_dir", str(tmp_path / "logs")]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    environ["RAY_DASHBOARD_ADDRESS"] = f"http://127.0.0.1:{free_port()}"
    environ["ROLLOUT_GATEWAY_NAME"] = NAME
    environ.pop("RAY_ADDRESS", None)
    output = tmp_path / "output"
    with output.open("w") as file:
        serving = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while "rollout URL:" not in output.read_text():
            assert serving.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.5)
        url = f"http://127.0.0.1:{port}"
        assert url in output.read_text()
        assert [card["id"] for card in ask(f"{url}/v1/models")["data"]] == [MODEL]
        body = {"model": MODEL, "prompt": [[2, 8, 6, 7, 3]] * 2, "max_tokens": 8, "return_token_ids": True}
        assert len(ask(f"{url}/v1/completions", body)["choices"]) == 2
        assert [replica["state"] for replica in ask(f"{url}/status")["replicas"]] == ["SERVING", "SERVING"]
        serving.terminate()
        assert serving.wait(STOP_S) == 0, output.read_text()
    finally:
        serving.kill()
        serving.wait()
        subprocess.run([words[0], "down"], env=environ, capture_output=True, timeout=120, check=False)
