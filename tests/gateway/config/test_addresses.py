"""The URL that others can use of a socket bound to all addresses."""

import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from gateway.config.addresses import url_of


def test_a_named_address_stays() -> None:
    assert url_of("10.0.0.7", 80) == "http://10.0.0.7:80"
    assert url_of("fd00::1", 80) == "http://[fd00::1]:80"


def test_a_socket_on_all_addresses_is_reached_at_the_url_that_is_printed() -> None:
    class Hello(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("0.0.0.0", 0), Hello) as server:
        Thread(target=server.handle_request).start()
        url = url_of("0.0.0.0", server.server_port)
        assert "0.0.0.0" not in url
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=10) as response:
            assert response.status == 204
