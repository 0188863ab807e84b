"""A gateway's needs at its start, and its client for a replica."""

import json
import socket
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.engine import Peer
from engines.errors import ConfigError
from engines.store.weight_store import WeightStore
from engines.types import EngineKind, ReplicaInfo
from gateway.config.schema import Config
from gateway.http import listener
from gateway.http.access import store_key
from gateway.http.engine_client import engine_client
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
FAR = replace(NEAR, url="http://127.0.0.2:5", key="secret")


async def peer_of(info: ReplicaInfo, gateway: dict[str, Any], **weights: Any) -> Peer | None:
    config = Config.model_validate({"gateway": KEYS | gateway, "weights": weights, "engine": {"kind": "sim"}})
    client = engine_client(config, info)
    assert isinstance(client, VllmEngine)
    await client.close()
    found = client._peer
    assert found is None or found.key == store_key(config.gateway)
    return found


@pytest.mark.parametrize(
    ("gateway", "url"),
    [
        ({"host": "10.1.2.3", "port": 9000}, "http://10.1.2.3:9000"),
        ({"host": "head.cluster", "port": 9000}, "http://head.cluster:9000"),
        ({"host": "fd00::1", "port": 9000}, "http://[fd00::1]:9000"),
        ({"host": "0.0.0.0", "port": 9000}, "http://127.0.0.1:9000"),  # the address that leads to 127.0.0.2
    ],
)
async def test_an_engine_on_another_node_fetches_versions_where_the_gateway_is_reached(
    gateway: dict[str, Any], url: str
) -> None:
    found = await peer_of(FAR, gateway)
    assert found is not None
    assert found.url == url


async def test_one_on_the_gateways_node_has_the_folder() -> None:
    assert await peer_of(NEAR, {"host": "10.1.2.3", "port": 9000}) is None


async def test_of_a_gateway_on_loopback_nobody_fetches_but_where_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert await peer_of(FAR, {"host": "127.0.0.1", "port": 9000}) is None
    assert "bind gateway.host" in capsys.readouterr().out
    found = await peer_of(FAR, {"host": "127.0.0.1", "port": 9000}, peer_url="https://head:1")
    assert found is not None
    assert found.url == "https://head:1"


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
