"""Bearer keys with names, and keys of sessions that these sign. Keys in a file are read again when it changes, so that
they rotate without a restart."""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from pydantic import SecretStr

from engines.errors import ConfigError
from gateway.config.load import key_file, keys_in

log = structlog.get_logger()

_LOOK_S = 1.0
_OF_SESSIONS = "rgs-"


class SessionKey(NamedTuple):
    """The key of one session, which opens its turns alone. Whoever knows the key that signs it can make it."""

    session: str
    signature: str

    @classmethod
    def signed(cls, session: str, key: str) -> "SessionKey":
        """Return the key of a session. An empty `key` signs one that opens nothing, and only names its session."""
        signature = hmac.new(key.encode(errors="surrogateescape"), f"session:{session}".encode(), hashlib.sha256)
        return cls(session, signature.hexdigest()[:32])

    @classmethod
    def read(cls, text: str) -> "SessionKey | None":
        """Return a key of a session; None for another key."""
        name, _, signature = text.removeprefix(_OF_SESSIONS).rpartition("-")
        if not text.startswith(_OF_SESSIONS):
            return None
        try:
            return cls(base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode(), signature)
        except ValueError:
            return cls("", "")

    def is_signed_by(self, key: str) -> bool:
        given, signed = (one.signature.encode(errors="replace") for one in (self, self.signed(self.session, key)))
        return secrets.compare_digest(given, signed)

    def __str__(self) -> str:
        return f"{_OF_SESSIONS}{base64.urlsafe_b64encode(self.session.encode()).decode().rstrip('=')}-{self.signature}"


class _Key:
    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.digest = digest(text)


class Keys:
    """The keys of one list of the configuration. A key's name is its place there, with its file and place in that."""

    def __init__(self, section: str, items: Sequence[SecretStr], now: Callable[[], float] = time.monotonic) -> None:
        """Raise `ConfigError` for a file without a key that can be read."""
        self._now = now
        self._looked_at = now()
        self._known: dict[str, list[_Key]] = {}
        self._files: dict[str, Path] = {}
        for index, item in enumerate(items):
            name, text = f"{section}[{index}]", item.get_secret_value()
            if path := key_file(text):
                self._files[name] = path
                self._read(name, path)
            else:
                self._known[name] = [_Key(name, text)]

    def name_of(self, key: str) -> str:
        """Return the name of a key; "" for a key that is not among them."""
        # All are compared, each in constant time, so that the time taken reveals nothing about the keys.
        given = digest(key)
        found = [known.name for known in self._now_known() if secrets.compare_digest(given, known.digest)]
        return found[0] if found else ""

    def signer_of(self, key: SessionKey) -> str | None:
        """Return the key that has signed the key of a session; None if none of these has."""
        texts = [known.text for known in self._now_known()]
        found = [text for text in texts if key.is_signed_by(text)]
        return found[0] if found else None

    def _now_known(self) -> "list[_Key]":
        if self._now() - self._looked_at >= _LOOK_S:
            self._looked_at = self._now()
            for name, path in self._files.items():
                try:
                    self._read(name, path)
                except ConfigError as error:
                    log.error("keys cannot be read: the keys before still hold", name=name, error=str(error))
        return [one for keys in self._known.values() for one in keys]

    def _read(self, name: str, path: Path) -> None:
        self._known[name] = [_Key(f"{name}, key {at} of {path}", key) for at, key in enumerate(keys_in(path), 1)]


def digest(key: str) -> str:
    """The key itself, and not its place in the configuration or a file, which another key may have tomorrow."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
