"""Calls of the commands to a URL where no gateway is."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engines.errors import ConfigError, GatewayUnreachable
from gateway.cli.rollout_url import ask, download
from tests.rigs.greeter import greeter


def test_a_server_that_speaks_no_http_is_no_gateway() -> None:
    with greeter() as url, pytest.raises(GatewayUnreachable, match=f"no gateway answers at {url}: .*SSH-2.0"):
        ask(url, "/dashboard.json", "")


def test_a_file_that_cannot_be_written_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "no folder" / "profile.tar"
    with pytest.raises(ConfigError, match=f"{file} cannot be written: No such file or directory"):
        download("http://127.0.0.1:1", "/profile", "", {}, file, 1.0)


def test_a_download_that_fails_leaves_the_file_before_it(tmp_path: Path) -> None:
    file = tmp_path / "profile.tar"
    file.write_text("before")
    with pytest.raises(GatewayUnreachable):
        download("http://127.0.0.1:1", "/profile", "", {}, file, 1.0)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("profile.tar", "before")]


@pytest.mark.parametrize("url", ["nonsense", "127.0.0.1:8100", "file:///etc/hostname", ""])
def test_a_url_that_is_none_is_refused_with_its_form(url: str) -> None:
    with pytest.raises(ConfigError, match=f"--url '{url}': expected http://host:port of a gateway"):
        ask(url, "/status", "")


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """A server that redirects to another name of its own, and the keys that come there."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:  # http.server's name
            if self.headers["Host"].startswith("localhost") or self.path.startswith("http:"):
                keys.append(self.headers.get("Authorization", ""))
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{port}/status")
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{port}", keys
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_key_goes_to_the_named_address_alone(
    elsewhere: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, keys = elsewhere
    monkeypatch.setenv("http_proxy", url)
    for asked in (url, "http://127.0.0.1:1"):
        with pytest.raises(GatewayUnreachable, match=r"302|refused"):
            ask(asked, "/status", "secret")
    assert keys == []
