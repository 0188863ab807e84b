"""Bearer keys with names. Keys in a file are read again when it changes, so that they rotate without a restart."""

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from pydantic import SecretStr

from engines.errors import ConfigError
from gateway.config.load import key_file, keys_in

log = structlog.get_logger()

_LOOK_S = 1.0


class Keys:
    """The keys of one list of the configuration. A key's name is its place there, with its file and place in that."""

    def __init__(self, section: str, items: Sequence[SecretStr], now: Callable[[], float] = time.monotonic) -> None:
        """Raise `ConfigError` for a file without a key that can be read."""
        self._now = now
        self._looked_at = now()
        self._known: dict[str, list[tuple[str, bytes]]] = {}
        self._files: dict[str, tuple[Path, object]] = {}
        for index, item in enumerate(items):
            name, text = f"{section}[{index}]", item.get_secret_value()
            if path := key_file(text):
                try:
                    self._read(name, path)
                except (OSError, ValueError) as error:
                    raise ConfigError(f"{name}: {path} holds no key that can be read: {error}") from error
            else:
                self._known[name] = [(name, _digest(text))]

    def name_of(self, key: str) -> str:
        """Return the name of a key; "" for a key that is not among them."""
        if self._now() - self._looked_at >= _LOOK_S:
            self._looked_at = self._now()
            self._look()
        digest = _digest(key)
        # All are compared, each in constant time, so that the time taken reveals nothing about the keys.
        found = [name for keys in self._known.values() for name, known in keys if secrets.compare_digest(digest, known)]
        return found[0] if found else ""

    def _look(self) -> None:
        """Read the files that have changed. One that is gone, or holds no key, leaves the keys that it had before."""
        for name, (path, seen) in self._files.items():
            if _signature(path) == seen:
                continue
            try:
                self._read(name, path)
                log.info("keys were read again", file=str(path), keys=len(self._known[name]))
            except (OSError, ValueError) as error:
                log.error("keys cannot be read: the keys before still hold", file=str(path), error=str(error))

    def _read(self, name: str, path: Path) -> None:
        found = _signature(path)
        self._known[name] = [
            (f"{name}, key {number} of {path}", _digest(key)) for number, key in enumerate(keys_in(path), 1)
        ]
        self._files[name] = path, found


def _signature(path: Path) -> object:
    """What changes with the content, and with the permission to read it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
