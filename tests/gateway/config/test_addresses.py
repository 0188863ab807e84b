"""The URL that others can use of a socket bound to all addresses."""

from gateway.config.addresses import url_of


def test_a_named_address_stays() -> None:
    assert url_of("10.0.0.7", 80) == "http://10.0.0.7:80"
    assert url_of("fd00::1", 80) == "http://[fd00::1]:80"
