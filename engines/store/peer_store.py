"""Fetches versions from another machine's weight store over HTTP, several files at a time; renames whole
ones into place.

The gateway serves them (`GET /v1/weight_store/versions/N` and the files under it). A file whose connection breaks
resumes at its last byte. Engines' workers and the command line use this file; it needs neither engine nor torch.
"""

import http.client
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from engines.checkpoint.folder import is_file_name
from engines.errors import DeadlineExceeded, InvalidRequest, StoreFailed
from engines.store.files import check_room, disk_errors, sync, try_lock
from engines.store.manifest import MANIFEST, check_bytes

VERSIONS_PATH = "/v1/weight_store/versions"

_CONNECTIONS = 4
_PIECE_BYTES = 1 << 20
_SILENCE_S = 15.0
_TRIES = 5  # without a byte in between
_RETRY_S = 0.2
_LOCK = ".fetching"
_PARTIAL = ".fetch-"  # prefix of folders that arrive, or are being removed
_FETCHED = ".fetched"  # in folders that a fetch has made; its time orders the versions
_KEPT = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    num_bytes: int


class PeerStore:
    """The store of the gateway at `url`, with its key where it needs one. Blocking."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{url!r} is not a gateway's URL, http://HOST:PORT", param="url")
        self._url = url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def newest(self) -> int:
        """Return the newest version that the peer keeps. Raise `StoreFailed` where it keeps none or does not answer."""
        versions = self._ask(VERSIONS_PATH, lambda answer: [int(version) for version in answer["versions"]])
        if not versions:
            raise StoreFailed(f"{self._url} keeps no weight version yet: version 0 is the checkpoint")
        return max(versions)

    def fetch(self, version: int, target: Path, timeout_s: float) -> Path:
        """Fetch the version into folder `target` and check every tensor's digest. Return the folder.

        A local version stays if its manifest is the peer's: an earlier run may have used the number.

        Raise `StoreFailed` where the peer lacks the version or is silent, the bytes are damaged, or the disk is full,
        and `DeadlineExceeded` after `timeout_s`.
        """
        fetch = _Fetch(self, version, target, time.monotonic() + timeout_s)
        with disk_errors(target):
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with fetch.alone():
                fetch.run()
        return target

    def files(self, version: int) -> list[_File]:
        def listed(answer: Any) -> list[_File]:
            return [_File(str(file["name"]), int(file["bytes"])) for file in answer["files"]]

        files = self._ask(f"{VERSIONS_PATH}/{version}", listed)
        for file in files:
            if not is_file_name(file.name) or file.name.startswith("."):
                raise StoreFailed(f"{self._url} names a file {file.name!r}, which no version has")
        return files

    def manifest(self, version: int) -> dict[str, Any]:
        """Return the content of a version's manifest."""
        return self._ask(f"{VERSIONS_PATH}/{version}/{MANIFEST}", dict)

    def connect(self) -> http.client.HTTPConnection:
        return self._connection_class(self._host, self._port, timeout=_SILENCE_S)

    def get(self, connection: http.client.HTTPConnection, path: str, span: str = "") -> http.client.HTTPResponse:
        """Return the response to a GET. Raise `StoreFailed` where it is not a success."""
        headers = {**self._headers, **({"Range": f"bytes={span}"} if span else {})}
        connection.request("GET", self._path + path, headers=headers)
        answer = connection.getresponse()
        wanted = 206 if span else 200
        if answer.status != wanted:
            with answer:
                reason = _reason(answer.read(_PIECE_BYTES))
            raise StoreFailed(f"{self._url}{path} answered {answer.status}, not {wanted}: {reason}")
        return answer

    def _ask(self, path: str, read: Callable[[Any], T]) -> T:
        """Return the answer of a GET, as `read` reads it. Raise `StoreFailed` where there is none of that form."""
        connection = self.connect()
        try:
            with self.get(connection, path) as answer:
                return read(json.loads(answer.read()))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise StoreFailed(f"{self._url}{path} cannot be read: {error}") from error
        finally:
            connection.close()


class _Fetch:
    """The fetch of one version."""

    def __init__(self, peer: PeerStore, version: int, target: Path, deadline: float) -> None:
        self._peer = peer
        self._version = version
        self._target = target
        self._deadline = deadline
        self._stopped = threading.Event()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the machine's lock: one worker fetches, and the others wait."""
        lock = os.open(self._target.parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(lock):
                self._check_time("another process fetches it")
                time.sleep(_RETRY_S)
            yield
        finally:
            os.close(lock)

    def run(self) -> None:
        """Fetch the version unless it is there, `alone`."""
        for left in self._target.parent.glob(f"{_PARTIAL}*"):  # by a worker that died
            shutil.rmtree(left, ignore_errors=True)
        files = self._peer.files(self._version)
        if self._target.is_dir():
            if self._is_there():
                return
            _remove(self._target)
        partial = Path(mkdtemp(prefix=_PARTIAL, dir=self._target.parent))
        try:
            check_room(partial, sum(file.num_bytes for file in files))
            self._receive(partial, files)
            self._check(partial)
            (partial / _FETCHED).touch()
            sync(partial)
            partial.rename(self._target)
            sync(self._target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def remove_old(self) -> None:
        """Remove all fetched versions but the last `_KEPT`."""
        # A clock that was set back would make this one the oldest.
        folders = self._target.parent.glob("v*")
        others = [folder for folder in folders if folder != self._target and (folder / _FETCHED).is_file()]
        for old in sorted(others, key=lambda folder: (folder / _FETCHED).stat().st_mtime_ns)[: 1 - _KEPT]:
            with suppress(OSError):
                _remove(old)

    def _is_there(self) -> bool:
        theirs = self._peer.manifest(self._version)
        try:
            ours = json.loads((self._target / MANIFEST).read_bytes())
        except (OSError, ValueError):
            return False
        (self._target / _FETCHED).touch()
        return bool(ours == theirs)

    def _check(self, partial: Path) -> None:
        try:
            manifest = check_bytes(partial)
        except (InvalidRequest, StoreFailed) as error:
            raise StoreFailed(f"version {self._version} arrived damaged: {error}") from error
        if manifest.version != self._version:
            raise StoreFailed(f"the peer's version {self._version} says that it is {manifest.version}")

    def _receive(self, partial: Path, files: Sequence[_File]) -> None:
        """Fetch these files, some at a time, onto the disk."""
        with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="fetch") as pool:
            try:
                running = [pool.submit(self._receive_file, partial / file.name, file) for file in files]
                done, late = wait(running, timeout=self._deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
                for received in done:
                    received.result()
                if late:
                    self._check_time("bytes are missing yet")
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _receive_file(self, path: Path, file: _File) -> None:
        """Fetch one file, and resume it where it breaks off. Give up after `_TRIES` connections without a byte."""
        with disk_errors(path):
            begun = path.open("wb")
        with begun:
            failures = 0
            while (position := begun.tell()) < file.num_bytes:
                try:
                    for piece in self._pieces(file, position):
                        with disk_errors(path):
                            begun.write(piece)
                except (OSError, http.client.HTTPException) as error:
                    failures = 1 if begun.tell() > position else failures + 1
                    if failures == _TRIES:
                        raise StoreFailed(f"{file.name} of version {self._version} broke off: {error!r}") from error
                    self._check_time(f"{file.name} broke off: {error!r}")
                    self._stopped.wait(_RETRY_S * failures)
        sync(path)

    def _pieces(self, file: _File, position: int) -> Iterator[bytes]:
        """Yield the bytes of one connection, from `position` on."""
        connection = self._peer.connect()
        try:
            path = f"{VERSIONS_PATH}/{self._version}/{quote(file.name, safe='')}"
            with self._peer.get(connection, path, f"{position}-{file.num_bytes - 1}") as answer:
                while position < file.num_bytes:
                    self._check_time("bytes are missing yet")
                    # At most one read of the socket, which `_SILENCE_S` bounds: a peer may send byte by byte.
                    piece = answer.read1(min(_PIECE_BYTES, file.num_bytes - position))
                    if not piece:
                        raise ConnectionResetError(f"the connection ended {file.num_bytes - position} bytes early")
                    position += len(piece)
                    yield piece
        finally:
            connection.close()

    def _check_time(self, state: str) -> None:
        if self._stopped.is_set() or time.monotonic() > self._deadline:
            raise DeadlineExceeded(f"version {self._version} did not arrive in time: {state}")


def fetched(path: Path, peer: PeerStore, version: int, timeout_s: float) -> Path:
    """Return the folder of a version, fetched where this machine lacks it. `path` is the gateway's own folder of it.

    The last two fetched versions are kept.
    """
    with disk_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(path):
            return path
    fetch = _Fetch(peer, version, path, time.monotonic() + timeout_s)
    with disk_errors(path), fetch.alone():
        if not _is_own(path):  # the look before saw a folder that went meanwhile
            fetch.run()
            fetch.remove_old()
    return path


def _is_own(path: Path) -> bool:
    """Return True for the gateway's own folder of a version, or a shared one. Fetches beside this do not disturb it."""
    return not (path / _FETCHED).is_file() and path.is_dir()  # in this order: a fetched folder goes with its mark


def _remove(folder: Path) -> None:
    """Remove a folder, under another name first: a folder with a version's name is never without some of its files."""
    gone = folder.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
