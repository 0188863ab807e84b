"""Runs of Locust in processes of their own: importing it here would patch this process's sockets for gevent."""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from engines.process.port import free_port

ROOT = Path(__file__).parents[2]
_BOUND_S = 300.0  # a hang


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    code: int
    said: str
    figures: dict[str, float]

    @property
    def has_passed(self) -> bool:
        """True if nothing failed. Where a busy machine sent requests late, the report says so, and exits with 3."""
        return self.code == (3 if "INVALID the load generator sent requests" in self.said else 0)


async def locust(scenario: str, url: str, folder: Path, *options: str, bound_s: float = _BOUND_S) -> Ended:
    """Run a scenario against `url`, a short one unless `options` say otherwise."""
    figures = folder / f"{scenario}.json"
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        f"loadtests/scenarios/{scenario}.py",
        "--headless",
        "--only-summary",
    ]
    command += ["--host", url, "--stop-timeout", "20", "--prompt-tokens", "8", "--max-tokens", "6"]
    # With --processes the master listens, on a fixed port of all addresses unless told otherwise.
    port = str(free_port())
    command += ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    command += ["--figures", str(figures), *options]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(bound_s):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found: dict[str, Any] = orjson.loads(figures.read_bytes()) if figures.exists() else {}
    assert process.returncode is not None
    return Ended(process.returncode, said.decode(), found)
