"""Ray's dashboard and our control plane as `rollout-gateway` meets them, played by one HTTP server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engines.engine import Json


class PlayedServe:
    """Serve with some applications. What is deployed runs at once; `deployed` and `deleted` record the calls."""

    def __init__(self) -> None:
        self.applications: dict[str, Json] = {}
        self.events: list[Json] = []
        self.replicas: list[Json] = []
        self.refused: dict[str, str] = {}
        self.deployed: list[Json] = []
        self.deleted: list[str] = []
        self.node: Json = {"state": "ALIVE", "node_ip": "127.0.0.1", "resources_total": {"CPU": 2.0}}
        self._clock = 0.0
        self.url = ""
        self.outcome = "RUNNING"
        self.builds = True
        self.has_run = True

    def details(self) -> Json:
        host, _, port = self.url.removeprefix("http://").partition(":")
        http = {"host": host, "port": int(port)}
        if not self.has_run:
            return {"applications": {}}
        return {"applications": self.applications, "proxy_location": "HeadOnly", "http_options": http}

    def put(self, document: Json) -> None:
        self.deployed.append(document)
        self.has_run = True
        named = {one["name"]: one for one in document["applications"]}
        self.deleted += [name for name in self.applications if name not in named]
        self.applications = {name: self.running(one, status=self.outcome) for name, one in named.items()}

    def running(self, application: Json, engine_state: str = "RUNNING", status: str = "RUNNING") -> Json:
        self._clock += 1
        replica = {"replica_id": "r1", "state": engine_state, "start_time_s": 0.0}
        config = {"ray_actor_options": {"num_cpus": 0.1, "num_gpus": 0}}
        deployment = {"replicas": [replica], "status": "HEALTHY", "message": "", "deployment_config": config}
        return {
            "status": status,
            "message": "",
            "route_prefix": application.get("route_prefix"),
            "last_deployed_time_s": self._clock,
            "deployments": {"engine": deployment, "gateway": {**deployment, "replicas": []}} if self.builds else {},
            "deployed_app_config": application,
        }

    def reply(self, path: str) -> Json:
        pages: dict[str, Any] = {
            "/api/version": {},
            "/api/serve/applications/": self.details(),
            "/api/v0/nodes": {"data": {"result": {"result": [self.node]}}},
            "/url": {"url": "http://127.0.0.1:8100"},
            "/status": {"replicas": self.replicas, "events": self.events, "replicas_refused": self.refused},
            "/health": {"ready": True},
        }
        return dict(pages[path])


@contextmanager
def played_serve() -> Iterator[PlayedServe]:
    serve = PlayedServe()

    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(serve.reply(self.path))

        def do_PUT(self) -> None:
            serve.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send({})

        def do_DELETE(self) -> None:
            serve.deleted += serve.applications
            serve.applications = {}
            self._send({})

        def _send(self, body: Json) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    serve.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield serve
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
