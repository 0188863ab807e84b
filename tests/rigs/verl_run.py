"""verl's trainers as the scripts of examples/ start them, and real vLLM replicas behind a gateway for them, on CPU.

The gateway and its engines have the project's environment, verl one of its own.
"""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.process.port import free_port
from tests.rigs.shell import NAME

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "bin"
RUN_TIMEOUT_S = 1200.0
ASK_TIMEOUT_S = 120.0
UP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 120.0
LARGEST_DIFFERENCE = 1e-3
"""Of the probabilities that engines and trainer give a token, in float32."""


@dataclass(frozen=True)
class RealFleet:
    """A gateway in its own environment, and the process ids of the engines behind it where they are known."""

    url: str
    pids: list[int]

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=ASK_TIMEOUT_S) as response:
            return json.load(response)


def _settings(folder: Path) -> list[str]:
    # An engine that is slow on a busy machine is no dead one.
    patient = [f"fleet.stalled_after_s={UP_TIMEOUT_S:g}", f"fleet.probe_timeout_s={ASK_TIMEOUT_S:g}"]
    folders = [f"engine.log_dir={folder / 'engines'}", f"weights.store={folder / 'store'}"]
    return [*folders, f"gateway.ledger={folder / 'ledger'}", *patient, "fleet.lost_after_s=2"]


@contextmanager
def fleet(folder: Path) -> Iterator[RealFleet]:
    """Two vLLM replicas of the tiny model behind a gateway."""
    command = [str(BIN / "python"), "-m", "loadtests.fleet", "-c", "examples/tiny-cpu.yaml", "gateway.port=0"]
    with (
        (folder / "gateway.log").open("w") as log,
        subprocess.Popen(
            [*command, *_settings(folder)],
            cwd=ROOT,
            stdin=-1,
            stdout=-1,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            yield RealFleet(told["gateway"]["url"], [engine["pid"] for engine in told["engines"]])
        finally:
            process.stdin.close()
            process.wait(STOP_TIMEOUT_S)


@contextmanager
def up(folder: Path, *settings: str) -> Iterator[RealFleet]:
    """The same replicas on Ray Serve, as `rollout-gateway up` starts them."""
    port = free_port()
    environ = {
        **os.environ,
        "HOME": str(folder),
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{free_port()}",
        "ROLLOUT_GATEWAY_NAME": NAME,
    }
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "XDG_STATE_HOME"):
        environ.pop(name, None)

    def gateway(*words: str) -> None:
        done = subprocess.run(
            [str(BIN / "rollout-gateway"), *words],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    ports = [f"gateway.port={port}", f"serve.http_port={free_port()}"]
    try:
        gateway("up", "-c", "examples/tiny-cpu.yaml", *ports, *_settings(folder), *settings)
        yield RealFleet(f"http://127.0.0.1:{port}", [])
    finally:
        gateway("down")


class Run:
    """A training run by a script of examples/, whose metrics verl writes down step after step."""

    def __init__(self, script: str, folder: Path, url: str, *overrides: str) -> None:
        self._steps = folder / "steps.jsonl"
        self._log = folder / "verl.log"
        self._deadline = time.monotonic() + RUN_TIMEOUT_S
        # Without the address of a Ray cluster that may run here, and in a group that ends as one.
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [f"examples/{script}", url, *overrides],
                cwd=ROOT,
                env={**environment, "OUT": str(folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self, count: int) -> list[dict[str, Any]]:
        """The metrics of that many steps, when they are there."""
        while True:
            lines = self._steps.read_text().splitlines(keepends=True) if self._steps.exists() else []
            told = [json.loads(line) for line in lines if line.endswith("\n")]
            if len(told) >= count:
                return [step["data"] for step in told]
            assert self._process.poll() is None, self.last_words()
            assert time.monotonic() < self._deadline, self.last_words()
            time.sleep(0.1)

    def to_end(self, *, steps: int = 1) -> list[dict[str, Any]]:
        """The metrics of all steps, at least so many, once it has ended well."""
        try:
            assert self.wait() == 0, self.last_words()
        finally:
            self.end()
        return self.steps(steps)

    def wait(self) -> int:
        return self._process.wait(self._deadline - time.monotonic())

    def last_words(self) -> str:
        return "verl's last words:\n" + "".join(self._log.read_text().splitlines(keepends=True)[-60:])

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
