"""The certificate of the rollout URL, read from its files."""

import ssl

from engines.errors import ConfigError
from gateway.config.schema import TlsConfig


def read_certificate(tls: TlsConfig) -> ssl.SSLContext:
    """Return the context of a server. Raise `ConfigError` where the files hold no certificate and its key."""
    assert tls.certificate is not None
    assert tls.key is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        files = f"{tls.certificate} and {tls.key}"
        raise ConfigError(f"gateway.tls: {files} hold no certificate with its key: {error}") from error
    return context


def _no_password() -> str:
    """The password of a key that has one: OpenSSL itself would ask for it at a terminal, and wait."""
    return ""
