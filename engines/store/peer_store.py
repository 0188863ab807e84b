"""Fetches versions from another machine's weight store over HTTP, several files at a time; renames whole
ones into place.

The gateway serves them (`GET /v1/weight_store/versions/N` and the files under it). A file whose connection breaks
resumes at its last byte; whole files of an earlier fetch are reused. Where the version's base is on this machine, only
the changes are fetched and joined with it. Engines' workers and the command line use this file; it needs neither engine
nor torch.
"""

import http.client
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from engines.checkpoint import is_file_name
from engines.errors import DeadlineExceeded, InvalidRequest, StoreFailed
from engines.store.draft import DELTA
from engines.store.files import check_room, disk_errors, sync, try_lock
from engines.store.manifest import MANIFEST, Manifest, check_bytes
from engines.store.successor import Successor

VERSIONS_PATH = "/v1/weight_store/versions"

_CONNECTIONS = 4
_PIECE_BYTES = 1 << 20
_SILENCE_S = 15.0
_TRIES = 5  # without a byte in between
_RETRY_S = 0.2
_LOCK = ".fetching"
_FETCHED = ".fetched"  # in folders that a fetch has made; its time orders the versions
_IN_REMOVAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial")
_KEPT = 2


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
        with self._understood(VERSIONS_PATH) as answer:
            versions = [int(version) for version in answer["versions"]]
        if not versions:
            raise StoreFailed(f"{self._url} keeps no weight version yet: version 0 is the checkpoint")
        return max(versions)

    def fetch(self, version: int, target: Path, timeout_s: float) -> Path:
        """Fetch the version into folder `target` and check every tensor's digest. Return the folder.

        A local version stays if its digests are the peer's: an earlier run may have used the number.

        Raise `StoreFailed` where the peer lacks the version or is silent, the bytes are damaged, or the disk is full,
        and `DeadlineExceeded` after `timeout_s`. The next fetch of the version reuses the files that had arrived.
        """
        fetch = _Fetch(self, version, target, time.monotonic() + timeout_s)
        with disk_errors(target):
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with fetch.alone():
                fetch.run()
        return target

    def files(self, version: int) -> list[_File]:
        with self._understood(f"{VERSIONS_PATH}/{version}") as answer:
            files = [_File(str(file["name"]), int(file["bytes"])) for file in answer["files"]]
        for file in files:
            if not is_file_name(file.name) or file.name.startswith("."):
                raise StoreFailed(f"{self._url} names a file {file.name!r}, which no version has")
        return files

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

    @contextmanager
    def _understood(self, path: str) -> Iterator[Any]:
        """Yield the answer of a GET. Raise `StoreFailed` where it is not of the form that is read here."""
        answer = self._ask(path)
        try:
            yield answer
        except (ValueError, KeyError, TypeError) as error:
            raise StoreFailed(f"{self._url}{path} is no answer of a gateway: {error!r}") from error

    def _ask(self, path: str) -> Any:
        connection = self.connect()
        try:
            with self.get(connection, path) as answer:
                return json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreFailed(f"{self._url}{path} cannot be read: {error}") from error
        finally:
            connection.close()


class _Fetch:
    """The fetch of one version."""

    def __init__(self, peer: PeerStore, version: int, target: Path, deadline: float) -> None:
        self._peer = peer
        self._version = version
        self._target = target
        self._partial = target.with_name(f".{target.name}.partial")
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
        files = self._peer.files(self._version)
        self._partial.mkdir(mode=0o700, exist_ok=True)
        (self._partial / _FETCHED).touch()
        if self._target.is_dir():
            if self._is_there(files):
                _remove(self._partial)
                return
            _remove(self._target)
        self._remove_other_partials()
        manifest = self._joined(files) or self._whole(files)
        if manifest.version != self._version:
            raise StoreFailed(f"the peer's version {self._version} says that it is {manifest.version}")
        (self._partial / _FETCHED).touch()
        sync(self._partial)
        self._partial.rename(self._target)
        sync(self._target.parent)

    def remove_old(self) -> None:
        """Remove all fetched versions but the last `_KEPT`."""
        # A clock that was set back would make this one the oldest.
        folders = self._target.parent.glob("v*")
        others = [folder for folder in folders if folder != self._target and (folder / _FETCHED).is_file()]
        for old in sorted(others, key=lambda folder: (folder / _FETCHED).stat().st_mtime_ns)[: 1 - _KEPT]:
            with suppress(OSError):
                _remove(old)

    def _remove_other_partials(self) -> None:
        """Remove the files of other versions whose fetch broke off. The folder may have others' files of such names."""
        for partial in self._target.parent.glob(".*.partial"):
            if _IN_REMOVAL.fullmatch(partial.name):  # the mark may be gone, and files be left
                shutil.rmtree(partial, ignore_errors=True)
            elif partial != self._partial and (partial / _FETCHED).is_file():
                _remove(partial)

    def _is_there(self, files: Sequence[_File]) -> bool:
        self._receive([file for file in files if file.name == MANIFEST])
        theirs = Manifest.read(self._partial)
        try:
            ours = Manifest.read(self._target)
        except StoreFailed:
            return False
        (self._target / _FETCHED).touch()
        return ours.version == theirs.version and _digests(ours) == _digests(theirs)

    def _whole(self, files: Sequence[_File]) -> Manifest:
        files = [file for file in files if not file.name.endswith(DELTA)]
        self._receive_lacking(files)
        try:
            return check_bytes(self._partial)
        except (InvalidRequest, StoreFailed):
            # Files of an earlier fetch may have other bytes under the same names.
            self._receive(files)
            return self._checked()

    def _joined(self, files: Sequence[_File]) -> Manifest | None:
        """Return the version, built from its base; None where the base is not here, or the build fails."""
        self._receive([file for file in files if file.name == MANIFEST])
        if (successor := Successor.of(self._partial, self._target.parent)) is None:
            return None
        needed = [file for file in files if successor.needs(file.name)]
        self._remove_all_but(needed)
        self._receive_lacking(needed)
        try:
            return successor.build(self._partial)
        except (InvalidRequest, StoreFailed, OSError, ValueError):
            # The base is damaged or was just removed.
            self._remove_all_but([])
            return None

    def _receive_lacking(self, files: Sequence[_File]) -> None:
        lacking = [file for file in files if _size(self._partial / file.name) != file.num_bytes]
        check_room(self._partial, sum(file.num_bytes for file in lacking))
        self._receive(lacking)

    def _remove_all_but(self, files: Sequence[_File]) -> None:
        """Remove files that an earlier fetch may have linked from another version: they must not be written to."""
        kept = {self._partial / name for name in (_FETCHED, *(file.name for file in files))}
        for path in {*self._partial.iterdir()} - kept:
            path.unlink()

    def _checked(self) -> Manifest:
        try:
            return check_bytes(self._partial)
        except (InvalidRequest, StoreFailed) as error:
            _remove(self._partial)
            raise StoreFailed(f"version {self._version} arrived damaged: {error}") from error

    def _receive(self, files: Sequence[_File]) -> None:
        """Fetch these files, some at a time. A file gets its name when it is whole and on disk."""
        for file in files:
            (self._partial / file.name).unlink(missing_ok=True)
        with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="fetch") as pool:
            try:
                running = [pool.submit(self._receive_file, file) for file in files]
                done, late = wait(running, timeout=self._deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
                for received in done:
                    received.result()
                if late:
                    self._check_time("bytes are missing yet")
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        for file in files:
            sync(self._partial / _beside(file))
            (self._partial / _beside(file)).rename(self._partial / file.name)

    def _receive_file(self, file: _File) -> None:
        """Fetch one file, and resume it where it breaks off. Give up after `_TRIES` connections without a byte."""
        with disk_errors(self._partial):
            begun = (self._partial / _beside(file)).open("wb")
        with begun:
            failures = 0
            while (position := begun.tell()) < file.num_bytes:
                try:
                    for piece in self._pieces(file, position):
                        with disk_errors(self._partial):
                            begun.write(piece)
                except (OSError, http.client.HTTPException) as error:
                    failures = 1 if begun.tell() > position else failures + 1
                    if failures == _TRIES:
                        raise StoreFailed(f"{file.name} of version {self._version} broke off: {error!r}") from error
                    self._check_time(f"{file.name} broke off: {error!r}")
                    self._stopped.wait(_RETRY_S * failures)

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
    try:
        before = path.stat()
        is_fetched = (path / _FETCHED).is_file()
        # A fetched folder loses its name before its mark: one with this name still has had no mark.
        return path.is_dir() and not is_fetched and os.path.samestat(before, path.stat())
    except FileNotFoundError:
        return False


def _remove(folder: Path) -> None:
    """Remove a folder, under another name first: a folder with a version's name is never without some of its files."""
    gone = folder.with_name(f".{folder.name.strip('.')}.{uuid.uuid4().hex}.partial")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _digests(manifest: Manifest) -> dict[str, str]:
    return {name: tensor.digest for name, tensor in manifest.tensors.items()}


def _beside(file: _File) -> str:
    return f".{file.name}.part"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
