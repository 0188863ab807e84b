"""Versions fetched from a peer: over connections that break, from peers that are silent, wrong or short."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest

from engines import peer_store
from engines.errors import DeadlineExceeded, InvalidRequest, StoreFailed
from engines.peer_store import VERSIONS_PATH, PeerStore, fetched
from engines.weight_store import Draft, WeightStore, check_bytes, raw

NUM_BYTES = 64_000
TIMEOUT_S = 20.0


@dataclass
class Peer:
    """A server over a store, and how it treats its clients."""

    store: WeightStore
    url: str = ""
    cut_after: list[int] = field(default_factory=list)  # bytes of the next ranges before the connection breaks
    damaged: int = 0  # so many answers have a wrong byte
    silent: bool = False
    asked: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(peer: Peer) -> Iterator[Peer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:  # http.server's name
            if peer.silent:
                peer.ended.wait(TIMEOUT_S)
                return None
            peer.asked.append(f"{self.path} {self.headers.get('Range', '')}")
            version, _, name = self.path.removeprefix(VERSIONS_PATH).strip("/").partition("/")
            if not version:
                return self._say(200, orjson.dumps({"versions": peer.store.versions, "served": 1}))
            if not peer.store.has(int(version)):
                return self._say(409, orjson.dumps({"error": {"message": f"version {version} is not kept"}}))
            folder = peer.store.path(int(version))
            if not name:
                files = [{"name": path.name, "bytes": path.stat().st_size} for path in folder.iterdir()]
                return self._say(200, orjson.dumps({"files": files}))
            begin, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
            content = bytearray((folder / name).read_bytes()[begin : end + 1])
            if peer.damaged and name.endswith(".safetensors"):
                peer.damaged, content[-1] = peer.damaged - 1, content[-1] ^ 1
            return self._say(206, bytes(content))

        def _say(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            cut = peer.cut_after.pop(0) if status == 206 and peer.cut_after else len(content)
            self.wfile.write(content[:cut])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    peer.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield peer
    finally:
        peer.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """Keeps version 1, whose file takes eight ranges."""
    monkeypatch.setattr(peer_store, "RANGE_BYTES", NUM_BYTES // 7)
    monkeypatch.setattr(peer_store, "_RETRY_S", 0.01)
    store = WeightStore(tmp_path / "peer")
    add_version(store, 1)
    with serving(Peer(store)) as running:
        yield running
    store.close()


def add_version(store: WeightStore, version: int) -> None:
    draft = store.draft()
    written = Draft(draft, "m")
    written.add([raw("w", "float32", [NUM_BYTES // 4], bytes(byte % 251 for byte in range(NUM_BYTES)))])
    written.finish()
    store.promote(draft, version, None)


def ranges(peer: Peer) -> list[str]:
    return [asked for asked in peer.asked if ".safetensors bytes=" in asked]


def test_a_version_comes_in_ranges_and_is_whole(peer: Peer, tmp_path: Path) -> None:
    target = tmp_path / "here" / "v1"
    assert PeerStore(peer.url).fetch(1, target, TIMEOUT_S) == target
    manifest = check_bytes(target)
    assert (manifest.version, manifest.tensors) == (1, check_bytes(peer.store.path(1)).tensors)
    assert len(ranges(peer)) == 8
    assert PeerStore(peer.url).newest() == 1


def test_a_range_goes_on_at_the_byte_where_its_connection_broke(peer: Peer, tmp_path: Path) -> None:
    peer.cut_after = [0, 100, 5000, 1, 7]
    PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert check_bytes(tmp_path / "v1").version == 1
    assert len(ranges(peer)) > 8
    begins = [asked.partition("bytes=")[2].partition("-")[0] for asked in ranges(peer)]
    assert {int(begin) % (NUM_BYTES // 7) for begin in begins} != {0}


def test_a_peer_that_goes_on_breaking_off_is_given_up(peer: Peer, tmp_path: Path) -> None:
    peer.cut_after = [0] * 1000
    with pytest.raises(StoreFailed, match="of version 1 broke off"):
        PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert not (tmp_path / "v1").exists()


def test_bytes_that_are_not_the_manifests_are_fetched_once_more(peer: Peer, tmp_path: Path) -> None:
    peer.damaged = 1
    PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert check_bytes(tmp_path / "v1").version == 1


def test_bytes_that_stay_wrong_are_refused_by_the_tensors_name(peer: Peer, tmp_path: Path) -> None:
    peer.damaged = 1000
    with pytest.raises(StoreFailed, match=r"version 1 arrived damaged: .*'w'"):
        PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert not (tmp_path / "v1").exists()


def test_files_that_were_whole_are_not_fetched_again(peer: Peer, tmp_path: Path) -> None:
    partial = tmp_path / ".v1.partial"
    partial.mkdir()
    (file,) = peer.store.path(1).glob("*.safetensors")
    (partial / file.name).write_bytes(file.read_bytes())
    PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert ranges(peer) == []
    assert check_bytes(tmp_path / "v1").version == 1


def test_what_a_fetch_before_left_of_other_bytes_is_fetched_again(peer: Peer, tmp_path: Path) -> None:
    partial = tmp_path / ".v1.partial"
    partial.mkdir()
    (file,) = peer.store.path(1).glob("*.safetensors")
    (partial / file.name).write_bytes(bytes(file.stat().st_size))
    PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert check_bytes(tmp_path / "v1").version == 1


def test_a_version_that_the_peer_does_not_keep_is_refused_in_its_words(peer: Peer, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="answered 409, not 200: version 7 is not kept"):
        PeerStore(peer.url).fetch(7, tmp_path / "v7", TIMEOUT_S)


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match=r"http://127\.0\.0\.1:9/v1/weight_store.* cannot be read"):
        PeerStore("http://127.0.0.1:9").fetch(1, tmp_path / "v1", TIMEOUT_S)
    with pytest.raises(InvalidRequest, match="is no URL of a gateway"):
        PeerStore("127.0.0.1:9")


def test_the_wait_for_a_silent_peer_is_bounded(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "_SILENCE_S", 0.2)
    peer.silent = True
    with pytest.raises(StoreFailed, match="cannot be read: TimeoutError"):
        PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)


def test_a_fetch_ends_at_its_deadline(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "_TRIES", 10**6)
    peer.cut_after = [0] * 10**5
    with pytest.raises(DeadlineExceeded, match="version 1 did not arrive in time"):
        PeerStore(peer.url).fetch(1, tmp_path / "v1", 0.5)


def test_workers_of_one_machine_fetch_a_version_once(peer: Peer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as workers:
        target = tmp_path / "here" / "v1"
        for done in [workers.submit(fetched, target, PeerStore(peer.url), 1, TIMEOUT_S) for _ in range(4)]:
            assert done.result() == target
    assert len(ranges(peer)) == 8


def test_the_last_two_fetched_versions_are_kept_and_nothing_else_is_touched(peer: Peer, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "v0").mkdir(parents=True)
    for version in (1, 2, 3):
        if version > 1:
            add_version(peer.store, version)
        fetched(here / f"v{version}", PeerStore(peer.url), version, TIMEOUT_S)
        time.sleep(0.01)
    assert sorted(path.name for path in here.glob("v*")) == ["v0", "v2", "v3"]


def test_a_disk_without_room_is_told_with_both_sizes(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearly_full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly_full)
    with pytest.raises(StoreFailed, match=r"has 10 bytes free, version 1 needs 6\d+"):
        PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
