"""TLS of the rollout URL, with certificates made by openssl."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from pydantic import ValidationError

from engines.errors import ConfigError
from gateway.config.schema import Config, GatewayConfig, TlsConfig
from gateway.http.listener import Listener

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make_certificate(folder: Path) -> TlsConfig:
    """A certificate for 127.0.0.1 that is its own authority."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return TlsConfig(certificate=str(certificate), key=str(key))


async def test_the_rollout_url_speaks_tls(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    engine = {"kind": "sim", "model": "sim"}
    gateway = {"port": 0, "tls": tls.model_dump(), "ledger": None}
    tree = {"gateway": gateway, "engine": engine, "weights": {"store": None}}

    async def none() -> list[object]:
        return []

    listener = Listener(Config.model_validate(tree), none)  # type: ignore[arg-type]  # an empty list is of any type
    url = await asyncio.to_thread(listener.start)
    try:
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=tls.certificate)
        async with aiohttp.ClientSession() as client, client.get(f"{url}/openapi.json", ssl=context) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as client, client.get(url.replace("https", "http")):
                pass
    finally:
        await asyncio.to_thread(listener.stop)


def test_files_without_a_certificate_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("nothing")
    tls = TlsConfig(certificate=str(tmp_path / "absent.pem"), key=str(tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match=r"gateway\.tls"):
        tls.read()


def test_a_key_with_a_password_stops_the_start_and_asks_for_none(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    locked = tmp_path / "locked.pem"
    words = ["openssl", "pkey", "-in", str(tls.key), "-aes128", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(words, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="SSL"):  # at a terminal OpenSSL would ask; without one it has another error
        TlsConfig(certificate=tls.certificate, key=str(locked)).read()


@pytest.mark.parametrize("tls", [{"certificate": "/c.pem"}, {"key": "/k.pem"}, {"certificate": "c.pem", "key": "/k"}])
def test_half_a_certificate_and_relative_paths_are_refused(tls: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"set both|no absolute path"):
        GatewayConfig.model_validate({"tls": tls})
