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
        self._config = config
        self.context = config.read()
        self._seen = self._signature()
        self._current = config.read()
        self.context.sni_callback = self._renew

    def _renew(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Give a new connection the certificate of the files as they are now."""
        try:
            if (found := self._signature()) != self._seen:
                self._current = self._config.read()
                self._seen = found
                log.info("the certificate was read again", file=self._config.certificate)
        except (OSError, ConfigError) as error:  # it is being replaced; the next connection looks again
            log.warning("the certificate cannot be read again: the one before still serves", error=str(error))
        connection.context = self._current

    def _signature(self) -> list[tuple[int, int]]:
        files = filter(None, (self._config.certificate, self._config.key))
        return [(found.st_mtime_ns, found.st_ino) for found in (Path(file).stat() for file in files)]
