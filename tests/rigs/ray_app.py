"""The Serve application as its clients see it, on a real Ray cluster."""

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines.process.port import free_port
from tests.rigs.waiting import wait_until

START_S = 300.0
RESTART_S = 300.0


class App:
    """The deployed application: its control plane and its rollout URL."""

    def __init__(self, control_url: str) -> None:
        self.control_url = control_url
        self.url = self.ask(control_url + "/url")["url"]

    def ask(self, url: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {replica["replica_id"]: replica for replica in self.ask(self.url + "/status")["replicas"]}

    def states(self) -> list[str]:
        return sorted(replica["state"] for replica in self.replicas().values())

    def update(self, address: str = "127.0.0.1") -> None:
        """A new trainer session, at this address, and one weight update."""
        size = self.ask(self.url + "/get_world_size")["world_size"]
        info = {"master_address": address, "master_port": 1, "rank_offset": 1, "world_size": size + 1}
        tensors = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[4, 4]]}
        self.ask(self.url + "/init_weight_transfer_engine", {"init_info": info})
        self.ask(self.url + "/start_weight_update", {})
        self.ask(self.url + "/update_weights", {"update_info": tensors})
        self.ask(self.url + "/finish_weight_update", {})

    def complete(self) -> list[Any]:
        body = {"model": "sim", "prompt": [[digit] for digit in range(3, 11)], "max_tokens": 4}
        choices: list[Any] = self.ask(self.url + "/v1/completions", body)["choices"]
        return choices


@contextmanager
def deployed_alone(engine: dict[str, Any], num_cpus: int = 2) -> Iterator[App]:
    """An application on a Ray of its own in this process."""
    import ray

    ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with deployed(engine) as app:
            yield app
    finally:
        ray.shutdown()


@contextmanager
def deployed(engine: dict[str, Any]) -> Iterator[App]:
    """An application on the cluster that this process is connected to, once its replicas serve. Serve ends with it."""
    from ray import serve

    from gateway.app import build
    from gateway.config.schema import Config

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="store-") as store:
        tree = {"engine": engine, "gateway": {"port": 0, "ledger": None}, "weights": {"store": store}}
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(Config.model_validate(tree)), name="test")
            app = App(f"http://127.0.0.1:{port}")
            wait_until(lambda: app.states() == ["SERVING"] * engine.get("num_replicas", 1), START_S)
            yield app
        finally:
            serve.shutdown()
