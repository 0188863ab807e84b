"""The demo as a user runs it: Ray, Serve, two real vLLM replicas and TRL, and nothing of it left afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.process.port import free_port
from gateway.ledger.ledger import default_folder
from gateway.weights.snapshots import in_memory
from tests.rigs.shell import NAME

pytest.importorskip("trl")
pytest.importorskip("vllm")
pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.ray]

RUN_S = 400
GONE_S = 30.0
MARK = "ROLLOUT_GATEWAY_TEST_MARK"


class Demo:
    """One run in a session of its own. Every process it starts, Ray's included, inherits a mark."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.mark = f"{MARK}={folder}"
        self.process: subprocess.Popen[str] | None = None
        self._environ = {
            **os.environ,
            MARK: str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{free_port()}",
            "RAY_AUTH_MODE": "disabled",
        }
        self._environ.pop("RAY_ADDRESS", None)

    def start(self, *options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "examples.demo", "--out", str(self.out), f"name={NAME}", *options]
        self.process = subprocess.Popen(
            command,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def left_behind(self) -> list[str]:
        """Command lines of processes of this run that stay; the kernel clears up after those that have ended."""
        deadline = time.monotonic() + GONE_S
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _processes(self) -> list[str]:
        return [
            (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            for process in Path("/proc").glob("[0-9]*")
            if self._is_ours(process)
        ]

    def _is_ours(self, process: Path) -> bool:
        try:
            return self.mark.encode() in (process / "environ").read_bytes().split(b"\0")
        except OSError:
            return False


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    run = Demo(tmp_path)
    yield run
    if run.process is not None:
        run.process.kill()  # ended already unless the test failed
        run.process.communicate()


def test_it_ends_with_both_replicas_at_the_last_version_and_leaves_a_picture(demo: Demo) -> None:
    output, _ = demo.start("--steps", "4").communicate(timeout=RUN_S)
    assert demo.process is not None
    assert demo.process.returncode == 0, output
    assert output.count("weight version 5") == 2, output
    assert (demo.out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert demo.left_behind() == []
    assert not in_memory(NAME).exists()
    assert not default_folder(NAME).exists()


def test_ctrl_c_takes_everything_down(demo: Demo) -> None:
    process = demo.start("--steps", "200")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step   2"):
            break
    os.killpg(process.pid, signal.SIGINT)
    output = process.stdout.read()
    assert process.wait(60) == 130, output
    assert demo.left_behind() == []
    assert not in_memory(NAME).exists()
