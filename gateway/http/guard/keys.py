"""Bearer keys with names. Keys in a file are read again when it changes, so that they rotate without a restart."""

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from pydantic import SecretStr

from engines.errors import ConfigError
from gateway.config.key_files import key_file, keys_in

log = structlog.get_logger()

_LOOK_S = 1.0


class Keys:
    """The keys of one list of the configuration. A key's name is its place there, with its file and place in that."""

    def __init__(self, section: str, items: Sequence[SecretStr], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._sources = [_source(f"{section}[{index}]", item) for index, item in enumerate(items)]
        self._looked_at = now()

    def name_of(self, key: str) -> str:
        """Return the name of a key; "" for a key that is not among them."""
        self._look()
        return self._name_of(_digest(key))

    def _name_of(self, digest: bytes) -> str:
        # All are compared, each in constant time, so that the time taken reveals nothing about the keys.
        found = [name for source in self._sources for name, known in source.keys if _is_equal(digest, known)]
        return found[0] if found else ""

    @property
    def digests(self) -> list[str]:
        """The SHA-256 of all keys in hexadecimal digits."""
        return [digest.hex() for source in self._sources for _, digest in source.keys]

    def _look(self) -> None:
        if self._now() - self._looked_at >= _LOOK_S:
            self._looked_at = self._now()
            for source in self._sources:
                source.look()


class _Written:
    """A key that the configuration holds itself."""

    def __init__(self, name: str, key: str) -> None:
        self.keys = [(name, _digest(key))]

    def look(self) -> None:
        """It cannot change."""


class _InFile:
    """The keys of a file. A file that is gone, or holds no key, leaves the keys that it had before."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._seen = self._unread = _signature(path)
        try:
            self.keys = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: {path} holds no key that can be read: {error}") from error

    def look(self) -> None:
        """Read the file again if it has changed, each time until it can be read."""
        if (found := _signature(self._path)) == self._seen:
            return
        try:
            self.keys = self._read()
        except (OSError, ValueError) as error:
            if found != self._unread:
                log.error("keys cannot be read: the keys before still hold", file=str(self._path), error=str(error))
            self._unread = found
            return
        self._seen = self._unread = found
        log.info("keys were read again", file=str(self._path), keys=len(self.keys))

    def _read(self) -> list[tuple[str, bytes]]:
        return [
            (f"{self._name}, key {number} of {self._path}", _digest(key))
            for number, key in enumerate(keys_in(self._path), 1)
        ]


def _source(name: str, item: SecretStr) -> _Written | _InFile:
    text = item.get_secret_value()
    return _InFile(name, path) if (path := key_file(text)) else _Written(name, text)


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    """What changes with the content, and with the permission to read it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _is_equal(one: bytes, other: bytes) -> bool:
    return secrets.compare_digest(one, other)
