"""TLS of the rollout URL. A renewed certificate is taken up at the next connection."""

import ssl
from pathlib import Path

import structlog

from engines.errors import ConfigError
from gateway.config.schema import TlsConfig

log = structlog.get_logger()


class Certificate:
    """The context of the listening socket, with the certificate in its files."""

    def __init__(self, config: TlsConfig) -> None:
        """Raise `ConfigError` where the files hold no certificate and its key."""
        assert config.certificate is not None
        assert config.key is not None
        self._files = Path(config.certificate), Path(config.key)
        try:
            self._seen = self._signature()
            self._current = self._read()
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            files = " and ".join(map(str, self._files))
            raise ConfigError(f"gateway.tls: {files} hold no certificate with its key: {error}") from error
        self.context.sni_callback = self._renew

    def _renew(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Give a new connection the certificate of the files as they are now."""
        try:
            if (found := self._signature()) != self._seen:
                self._current = self._read()
                self._seen = found
                log.info("the certificate was read again", file=str(self._files[0]))
        except (OSError, ssl.SSLError) as error:  # it is being replaced; the next connection looks again
            log.warning("the certificate cannot be read again: the one before still serves", error=str(error))
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files, password=_no_password)
        return context

    def _signature(self) -> list[tuple[int, int]]:
        return [(found.st_mtime_ns, found.st_ino) for found in (file.stat() for file in self._files)]


def _no_password() -> str:
    """The password of a key that has one: OpenSSL itself would ask for it at a terminal, and wait."""
    return ""
