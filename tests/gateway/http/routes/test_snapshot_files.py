"""Weight versions over HTTP: who may read them, and engines that fetch what their machine does not have."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.engine import Peer
from engines.errors import StoreFailed
from engines.store.draft import Draft, claim_draft, raw
from engines.store.manifest import check_bytes
from engines.store.peer_store import VERSIONS_PATH, PeerStore
from engines.types import ReplicaState
from gateway.http.access import store_key
from sim.worker import SimWorker
from tests.rigs.rig import Rig, StartRig
from tests.rigs.shell import NearShell

KEYS = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}
OWNER = {"Authorization": "Bearer owner"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


async def push(rig: Rig, folder: Path) -> None:
    draft, _ = claim_draft(folder)
    written = Draft(draft, "sim")
    written.add([raw("weight", "float32", [4, 4], bytes(64))])
    written.finish()
    body = {"transport": "store", "snapshot": draft.name}
    status, reply = await rig.post("/v1/weight_updates", body, headers=OWNER)
    assert status == 200, reply


@pytest.fixture
async def rig(start_rig: StartRig, folder: Path) -> Rig:
    """Serves version 1, and wants keys."""
    rig = await start_rig(1, weights={"store": str(folder)}, gateway=KEYS)
    await push(rig, folder)
    return rig


async def fetch(rig: Rig, key: str, target: Path, version: int = 1) -> Path:
    return await asyncio.to_thread(PeerStore(rig.url, key).fetch, version, target, 20.0)


async def test_a_version_is_fetched_whole_with_an_admin_key_or_the_engines_key(rig: Rig, tmp_path: Path) -> None:
    for name, key in (("a", "owner"), ("b", store_key(rig.config.gateway))):
        folder = await fetch(rig, key, tmp_path / name)
        assert check_bytes(folder).version == 1
        assert not (folder / ".label").exists()
    assert await asyncio.to_thread(PeerStore(rig.url, "owner").newest) == 1


@pytest.mark.parametrize("key", ["", "reader", "wrong"])
async def test_other_keys_read_nothing(rig: Rig, tmp_path: Path, key: str) -> None:
    with pytest.raises(StoreFailed, match=r"answered 40[13]"):
        await fetch(rig, key, tmp_path / "v1")


@pytest.mark.parametrize("name", [".label", ".gateway", "..%2F..%2Fetc%2Fpasswd", "absent", 300 * "a"])
async def test_only_a_versions_own_files_are_sent(rig: Rig, name: str) -> None:
    async with rig.client.get(f"{rig.url}{VERSIONS_PATH}/1/{name}", headers=OWNER) as response:
        assert response.status == 400


async def test_part_of_a_file_is_sent(rig: Rig, folder: Path) -> None:
    path = f"{rig.url}{VERSIONS_PATH}/1/manifest.json"
    async with rig.client.get(path, headers=OWNER | {"Range": "bytes=3-6"}) as response:
        assert response.status == 206
        assert await response.read() == (folder / "v1" / "manifest.json").read_bytes()[3:7]


async def test_a_version_that_is_not_kept_is_named(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="version 7 is not in"):
        await fetch(rig, "owner", tmp_path / "v7", version=7)


async def test_a_gateway_started_anew_hands_out_what_its_engines_hold(
    rig: Rig, start_rig: StartRig, folder: Path, tmp_path: Path
) -> None:
    await rig.stop_gateway()
    second = await start_rig(1, weights={"store": str(folder)}, gateway=KEYS, replicas=rig.replicas)
    assert await asyncio.to_thread(PeerStore(second.url, "owner").newest) == 1
    assert check_bytes(await fetch(second, "owner", tmp_path / "v1")).version == 1


async def test_an_engine_without_the_folder_fetches_the_version_it_is_to_load(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere" / "v1"
    worker = SimWorker("sim", {"weight": [4, 4]})
    calls: list[dict[str, Any]] = []

    async def over_there(self: VllmEngine, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        if path == "/collective_rpc":
            calls.append(body["kwargs"])
            await worker.call(body["method"], {**body["kwargs"], "path": str(elsewhere)})
        return {"weight_version": "default"}

    monkeypatch.setattr(VllmEngine, "ask", over_there)
    peer = Peer(url=rig.url, key=store_key(rig.config.gateway))
    engine = VllmEngine("engine-9", "http://127.0.0.1:1", has_tee=True, peer=peer)
    try:
        await engine.load_snapshot("/the/gateways/v1", 1, 20.0)
    finally:
        await engine.close()
    assert check_bytes(elsewhere).version == 1
    assert calls[0]["version"] == 1


async def test_a_version_is_fetched_while_its_replica_goes_on_serving(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching, may_end = threading.Event(), threading.Event()

    def fetch(worker: SimWorker, **given: Any) -> None:
        fetching.set()
        assert may_end.wait(20)

    monkeypatch.setattr(SimWorker, "_fetch", fetch)
    rig = await start_rig(1, weights={"store": str(folder), "peer_url": "http://10.0.0.1:8100"}, gateway=KEYS)
    pushing = asyncio.create_task(push(rig, folder))
    assert await asyncio.to_thread(fetching.wait, 20)
    assert [replica.state for replica in rig.fleet.trained] == [ReplicaState.SERVING]
    asked = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
    served, answer = await rig.post("/v1/completions", asked, headers=OWNER)
    assert served == 200
    assert answer["choices"][0]["weight_versions"] == [{"version": 0, "start": 0, "end": 3}]
    may_end.set()
    await pushing
    assert rig.fleet.version == 1


async def test_the_command_line_makes_a_checkpoint_folder_of_the_newest_version(rig: Rig, tmp_path: Path) -> None:
    shell = NearShell(tmp_path)
    shell.environ["ROLLOUT_API_KEY"] = "owner"
    for said, code in (("version 1 is in", 0), ("is there already", 1)):
        done = await asyncio.to_thread(shell.run, "fetch", str(tmp_path / "mine"), "--url", rig.url)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
    assert check_bytes(tmp_path / "mine").version == 1


@pytest.mark.parametrize("span", ["bytes=99999-", "bytes=6-3", "lines=1-2"])
async def test_a_range_that_is_none_is_refused(rig: Rig, span: str) -> None:
    status, reply = await rig.get(f"{VERSIONS_PATH}/1/manifest.json", headers=OWNER | {"Range": span})
    assert (status, reply["error"]["param"]) == (400, "Range")
