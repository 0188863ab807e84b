"""A gateway's needs at its start, and its client for a replica."""

import json
import socket
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from engines.store.weight_store import WeightStore
from engines.types import EngineKind, ReplicaInfo
from gateway.config.schema import Config
from gateway.http import listener
from gateway.http.listener import Listener

KEYS = {"inference_keys": ["reader"], "admin_keys": ["owner"]}
NEAR = ReplicaInfo(
    replica_id="engine-0",
    incarnation="1",
    group="engine",
    kind=EngineKind.VLLM,
    url="http://127.0.0.1:5",
    model="m",
    world_size=1,
    max_model_len=128,
    max_num_seqs=8,
    engine_version="0.32.0",
    has_tee=True,
    reader="127.0.0.1:5",
)
FAR = replace(NEAR, url="http://127.0.0.2:5", is_far=True)


async def nobody() -> list[ReplicaInfo]:
    return []


def listening(tmp_path: Path, port: int = 0, **gateway: Any) -> Listener:
    gateway |= {"port": port, "ledger": None}
    tree = {"gateway": gateway, "engine": {"kind": "sim"}, "weights": {"store": str(tmp_path)}}
    return Listener(Config.model_validate(tree), nobody)


def test_a_keyed_gateway_on_all_addresses_prints_a_url_that_others_can_use(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"inference_keys": ["a"], "admin_keys": ["b"], "trusted_networks": []}
    gateway = listening(tmp_path, host="0.0.0.0", **keys)
    url = gateway.start()
    try:
        assert "0.0.0.0" not in url
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(f"{url}/status", headers={"Authorization": "Bearer a"})) as response:
            assert json.load(response)["replicas"] == []
    finally:
        gateway.stop()


def test_two_gateways_never_share_a_weight_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_STORE_FREE_WITHIN_S", 0.0)
    first, second = listening(tmp_path), listening(tmp_path)
    first.start()
    try:
        with pytest.raises(
            ConfigError, match=rf"keeps the weight store {tmp_path}, and two gateways never share a store: set ano"
        ):
            second.start()
    finally:
        first.stop()


def test_a_gateway_waits_for_the_store_of_the_one_before_it(tmp_path: Path) -> None:
    before = WeightStore(tmp_path)
    threading.Timer(0.2, before.close).start()
    after = listening(tmp_path)
    after.start()
    after.stop()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gateway\.port = {port} on 127.0.0.1 cannot be bound: another process"):
            listening(tmp_path, port).start()
