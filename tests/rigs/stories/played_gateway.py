"""An HTTP server that plays a gateway to weight senders, with receivers as threads of this process."""

import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from engines.errors import WeightUpdateFailed
from engines.transfer.gloo import WeightGroup

NUM_ENGINES = 2
TIMEOUT_S = 90.0
POLL_S = 0.02
"""How long the end of a played gateway waits for it to look up."""
UNREAD = {"model": "tiny", "weight_version": 6, "update": None, "tensors": None, "replicas": []}
"""What is served where no replica could read its checkpoint."""
Answer = tuple[int, dict[str, Any]]


class PlayedGateway:
    """Answers the routes that senders call; its engines are `WeightGroup`s that receive when told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.received: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_ENGINES)]
        self.groups: list[WeightGroup] = []
        self.answers: dict[str, Callable[[dict[str, Any]], Answer | None]] = {
            "/health": lambda _: (200, {}),
            "/v1/models": lambda _: (200, {"data": [{"id": "tiny"}]}),
            "/server_info": lambda _: (200, {"vllm_config": {"weight_transfer_config": {"backend": "gloo"}}}),
            "/v1/weights": lambda _: (200, UNREAD),
            "/v1/weight_updates": lambda _: (200, {"weight_version": 6}),
            "/weight_info": lambda _: (200, {"weight_version": "6"}),
            "/get_world_size": lambda _: (200, {"world_size": NUM_ENGINES}),
            "/init_weight_transfer_engine": lambda body: self.join(**body["init_info"]),
            "/start_weight_update": lambda _: (200, {"message": "started"}),
            "/update_weights": lambda body: self.receive(**body["update_info"]),
            "/finish_weight_update": lambda _: (200, {"weight_version": 7}),
            "/reset_prefix_cache": lambda _: (200, {"success": True}),
        }
        self._pool = ThreadPoolExecutor(max_workers=NUM_ENGINES)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True)
        self._thread.start()

    def join(self, master_address: str, master_port: int, rank_offset: int, world_size: int, packed: bool) -> Answer:
        assert packed
        self.groups = [
            WeightGroup(master_address, master_port, rank_offset + engine, world_size, TIMEOUT_S)
            for engine in range(NUM_ENGINES)
        ]
        list(self._pool.map(WeightGroup.join, self.groups))
        return 200, {"message": "joined"}

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> Answer:
        announced = list(zip(names, [getattr(torch, name) for name in dtype_names], shapes, strict=True))
        running: list[Future[None]] = [
            self._pool.submit(group.receive, announced, got.update)
            for group, got in zip(self.groups, self.received, strict=True)
        ]
        try:
            for future in running:
                future.result()
        except WeightUpdateFailed as error:
            return 424, {"error": str(error)}
        return 200, {"message": "received"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for group in self.groups:
            group.close()
        self._pool.shutdown()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_DELETE(self) -> None:
                self._answer()

            def _answer(self) -> None:
                path = self.path.partition("?")[0]
                gateway.calls.append(path)
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = gateway.answers[path](json.loads(raw) if raw else {})
                if answer is None:
                    self.close_connection = True
                    return
                status, body = answer
                reply = json.dumps(body).encode()
                with contextlib.suppress(BrokenPipeError):  # The client may have lost patience.
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(reply)))
                    self.end_headers()
                    self.wfile.write(reply)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        return Handler
