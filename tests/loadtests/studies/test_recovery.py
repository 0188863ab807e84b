"""The study of a recovery, of a played gateway whose engines are processes that sleep."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loadtests.studies import recovery

FLEET_VERSION = 7


class Gateway:
    """Lists one replica; after its death a successor, which soon serves."""

    def __init__(self) -> None:
        self.victim, self.successor = (subprocess.Popen(["sleep", "300"]) for _ in range(2))
        self.url = ""
        self.asked = 0

    def status(self) -> dict[str, Any]:
        if self.victim.poll() is None:
            return {"weight_version": FLEET_VERSION, "replicas": [self._replica(self.victim, "SERVING", FLEET_VERSION)]}
        self.asked += 1
        serves = self.asked > 3
        replica = self._replica(self.successor, "SERVING" if serves else "SYNCING", FLEET_VERSION if serves else 0)
        return {"weight_version": FLEET_VERSION, "replicas": [replica]}

    def _replica(self, process: "subprocess.Popen[bytes]", state: str, version: int) -> dict[str, Any]:
        start = {"began": time.time(), "seconds": 0.2, "phases": {"importing": 0.1, "loading weights": 0.1}}
        found = {"state": state, "weight_version": version, "start": start}
        return found | {"pid": process.pid, "url": self.url, "model": "m"}


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    played = Gateway()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(played.status())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({"choices": []})

        def _answer(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        played.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield played
        server.shutdown()
    for process in (played.victim, played.successor):
        process.kill()
        process.wait()


def test_a_recovery_ends_with_tokens_of_the_fleet_s_version(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recovery.main(["--url", gateway.url, "--times", "1", "--apart-s", "0", "--limit-s", "30"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    parts = [part.split(" (+")[0].rpartition(" ")[0] for part in line.split(", ")[:-1]]
    assert parts == ["noticed", "importing", "loading weights", "joined", "serving", "answered"]


def test_a_replica_that_does_not_come_back_fails_the_study(gateway: Gateway) -> None:
    gateway.asked = -(10**6)
    assert recovery.main(["--url", gateway.url, "--times", "1", "--apart-s", "0", "--limit-s", "0.3"]) == 1
