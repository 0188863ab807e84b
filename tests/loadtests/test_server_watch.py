"""The watch over a server's pages. It runs in a process of its own: gevent patches a process's sockets."""

import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BOUND_S = 60.0

# /metrics answers once /status was asked three times.
WATCH = """
from gevent import monkey; monkey.patch_all()
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from loadtests.server_watch import ServerWatch

asked, recorded = {"/metrics": 0, "/status": 0}, []
served = threading.Event()

class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        asked[self.path] += 1
        if asked["/status"] == 3:
            served.set()
        if self.path == "/metrics":
            served.wait()
        body = b'{"replicas": []}' if self.path == "/status" else b"vllm:num_requests_running 7\\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
done = threading.Event()

def record(name, value, is_beside):
    recorded.append((name, value))
    if name == "engine_running":
        done.set()

settings = SimpleNamespace(host=f"http://127.0.0.1:{server.server_port}", api_key="")
watch = ServerWatch(SimpleNamespace(settings=settings, record=record))
watch.start()
assert done.wait(50)
watch.end()
print(asked["/metrics"], [value for name, value in recorded if name == "engine_running"])
"""


async def test_a_page_that_answers_late_is_waited_for_and_holds_no_other() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WATCH,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_BOUND_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert said.decode().split("\n")[0] == "1 [7]"
