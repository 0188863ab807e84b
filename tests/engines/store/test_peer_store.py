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
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson
import pytest

from engines.errors import DeadlineExceeded, InvalidRequest, StoreFailed
from engines.store import peer_store
from engines.store.draft import Draft, raw
from engines.store.manifest import check_bytes
from engines.store.peer_store import VERSIONS_PATH, PeerStore, fetched
from engines.store.weight_store import WeightStore

NUM_BYTES = 64_000
TIMEOUT_S = 20.0


@dataclass
class Peer:
    """A server over a store, and how it treats its clients."""

    store: WeightStore
    url: str = ""
    cut_after: list[int] = field(default_factory=list)  # bytes of the next files before the connection breaks
    damaged: int = 0  # so many answers have a wrong byte
    silent: bool = False
    slow_s: float = 0.0  # between two bytes of a file
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
            version, _, name = unquote(urlsplit(self.path).path).removeprefix(VERSIONS_PATH).strip("/").partition("/")
            if not version:
                return self._say(200, orjson.dumps({"versions": peer.store.versions, "served": 1}))
            if not peer.store.has(int(version)):
                return self._say(409, orjson.dumps({"error": {"message": f"version {version} is not kept"}}))
            folder = peer.store.path(int(version))
            if not name:
                files = [{"name": path.name, "bytes": path.stat().st_size} for path in folder.glob("[!.]*")]
                return self._say(200, orjson.dumps({"files": files}))
            if "Range" not in self.headers:
                return self._say(200, (folder / name).read_bytes())
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
            for place in range(cut if status == 206 and peer.slow_s else 0):
                self.wfile.write(content[place : place + 1])
                if peer.ended.wait(peer.slow_s):
                    return
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
    """Keeps version 1, of one file."""
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
    store.promote(draft, str(version), None)


def ranges(peer: Peer) -> list[str]:
    return [asked for asked in peer.asked if ".safetensors bytes=" in asked]


def test_a_version_comes_whole(peer: Peer, tmp_path: Path) -> None:
    target = tmp_path / "here" / "v1"
    assert PeerStore(peer.url).fetch(1, target, TIMEOUT_S) == target
    manifest = check_bytes(target)
    assert (manifest.version, manifest.tensors) == (1, check_bytes(peer.store.path(1)).tensors)
    assert len(ranges(peer)) == 1
    assert PeerStore(peer.url).newest() == 1


def test_a_file_goes_on_at_the_byte_where_its_connection_broke(peer: Peer, tmp_path: Path) -> None:
    peer.cut_after = [0, 100, 5000, 1, 7]
    PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert check_bytes(tmp_path / "v1").version == 1
    begins = [int(asked.partition("bytes=")[2].partition("-")[0]) for asked in ranges(peer)]
    assert begins[0] == 0 < begins[-1]
    assert begins == sorted(begins)


@pytest.mark.parametrize(
    ("fault", "within_s", "error", "said"),
    [
        ({"cut_after": [0] * 1000}, TIMEOUT_S, StoreFailed, "of version 1 broke off"),
        ({"damaged": 1000}, TIMEOUT_S, StoreFailed, "version 1 arrived damaged: .*'w'"),
        ({"silent": True}, TIMEOUT_S, StoreFailed, "cannot be read: timed out"),
        ({"slow_s": 0.02}, 0.5, DeadlineExceeded, "version 1"),
    ],
    ids=["breaks off", "damages", "is silent", "sends byte by byte"],
)
def test_a_peer_that_goes_on_with_it_is_given_up(
    peer: Peer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    within_s: float,
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.setattr(peer_store, "_SILENCE_S", 0.2)
    for name, value in fault.items():
        setattr(peer, name, value)
    began = time.monotonic()
    with pytest.raises(error, match=said):
        PeerStore(peer.url).fetch(1, tmp_path / "v1", within_s)
    assert time.monotonic() - began < TIMEOUT_S
    assert [path.name for path in tmp_path.iterdir() if path.name != "peer"] == [".fetching"]


def test_a_version_that_the_peer_does_not_keep_is_refused_in_its_words(peer: Peer, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="answered 409, not 200: version 7 is not kept"):
        PeerStore(peer.url).fetch(7, tmp_path / "v7", TIMEOUT_S)


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match=r"http://127\.0\.0\.1:9/v1/weight_store.* cannot be read"):
        PeerStore("http://127.0.0.1:9").fetch(1, tmp_path / "v1", TIMEOUT_S)
    with pytest.raises(InvalidRequest, match="is not a gateway's URL"):
        PeerStore("127.0.0.1:9")


def test_workers_of_one_machine_fetch_a_version_once(peer: Peer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as workers:
        target = tmp_path / "here" / "v1"
        for done in [workers.submit(fetched, target, PeerStore(peer.url), 1, TIMEOUT_S) for _ in range(4)]:
            assert done.result() == target
    assert len(ranges(peer)) == 1


def test_another_runs_version_of_the_number_is_not_taken_for_the_peers(peer: Peer, tmp_path: Path) -> None:
    target = tmp_path / "here" / "v1"
    fetched(target, PeerStore(peer.url), 1, TIMEOUT_S)
    draft = peer.store.draft()
    written = Draft(draft, "m")
    written.add([raw("w", "float32", [NUM_BYTES // 4], bytes(NUM_BYTES))])
    written.finish()
    peer.store.promote(draft, "1", None)
    fetched(target, PeerStore(peer.url), 1, TIMEOUT_S)
    assert check_bytes(target) == check_bytes(peer.store.path(1))
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["v1"]


def test_a_folder_that_nobody_fetched_is_the_gateways_own(peer: Peer, tmp_path: Path) -> None:
    shutil.copytree(peer.store.path(1), tmp_path / "shared" / "v1")
    fetched(tmp_path / "shared" / "v1", PeerStore("http://127.0.0.1:1"), 1, TIMEOUT_S)


def test_the_last_two_fetched_versions_are_kept_and_nothing_else_is_touched(peer: Peer, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "v0").mkdir(parents=True)
    for version in (1, 2, 3):
        if version > 1:
            add_version(peer.store, version)
        fetched(here / f"v{version}", PeerStore(peer.url), version, TIMEOUT_S)
        time.sleep(0.01)
    assert sorted(path.name for path in here.glob("v*")) == ["v0", "v2", "v3"]


def test_what_a_fetch_that_died_has_left_is_removed_by_the_next(peer: Peer, tmp_path: Path) -> None:
    left = tmp_path / ".fetch-0123"
    left.mkdir()
    (left / "half").write_bytes(bytes(100))
    PeerStore(peer.url).fetch(1, tmp_path / "v1", TIMEOUT_S)
    assert not left.exists()
