"""A gateway in a process of its own: `python -m tests.rigs.forked_gateway PORT URL` puts it in front of a server.

Tests end it with SIGKILL and start it again on its port.
"""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from engines.types import ReplicaInfo
from gateway.config.schema import Config
from gateway.http.listener import Listener
from tests.rigs.rig import FAST_WATCH, described

_LOOK_S = 0.05


class ForkedGateway:
    """One process, which writes to `log`."""

    def __init__(self, port: int, engine_url: str, log: Path) -> None:
        self._port = port
        self._log = log
        self._command = [sys.executable, "-m", "tests.rigs.forked_gateway", str(port), engine_url]
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

    def kill(self) -> None:
        """End it with SIGKILL, as the kernel does without memory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> None:
    port, url = int(sys.argv[1]), sys.argv[2]
    engine = {"kind": "external", "url": url, "model": "sim"}
    tree = {"gateway": {"port": port}, "engine": engine, "fleet": FAST_WATCH, "weights": {"store": None}}
    config = Config.model_validate(tree)

    async def discover() -> list[ReplicaInfo]:
        return [await described(config.groups["engine"], "engine-0", "engine")]

    Listener(config, discover).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
