"""A gateway as a program, in front of a server: `python -m tests.rigs.forked_gateway PORT URL [LEDGER]`.

Tests end it with SIGKILL and start it again on its port.
"""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import aiohttp

from engines.reading import server
from engines.types import ReplicaInfo
from gateway.config.schema import Config
from gateway.http.listener import Listener
from tests.rigs.readers import Eager, Readers
from tests.rigs.rig import FAST_WATCH, described

_LOOK_S = 0.05


class ForkedGateway:
    """One process, which writes to `log`."""

    def __init__(self, port: int, engine_url: str, log: Path, ledger: Path | None = None) -> None:
        self._port = port
        self._log = log
        self._command = [sys.executable, "-m", "tests.rigs.forked_gateway", str(port), engine_url]
        if ledger is not None:
            self._command.append(str(ledger))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        while self._process.poll() is None:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(_LOOK_S)
        raise AssertionError(self._log.read_text())

    async def serve(self, client: aiohttp.ClientSession) -> None:
        """Start it, and return when it is healthy."""
        await asyncio.to_thread(self.start)
        async with asyncio.timeout(60):
            while True:
                async with client.get(f"http://127.0.0.1:{self._port}/health") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it with SIGKILL, as the kernel does without memory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> None:
    port, url = int(sys.argv[1]), sys.argv[2]
    ledger = sys.argv[3] if len(sys.argv) > 3 else None
    engine = {"kind": "external", "url": url, "model": "sim"}
    tree = {
        "gateway": {"port": port, "ledger": ledger},
        "engine": engine,
        "fleet": FAST_WATCH,
        "weights": {"store": None},
    }
    config = Config.model_validate(tree)

    found: list[ReplicaInfo] = []
    readers = Readers()
    server.Joining = Eager  # type: ignore[attr-defined]

    async def discover() -> list[ReplicaInfo]:
        if not found:  # another description would be another engine
            info = await described(config.groups["engine"], "engine-0", "engine")
            found.extend(await readers.beside([replace(info, streams=True)]))  # as an engine that we start
        return found

    Listener(config, discover).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
