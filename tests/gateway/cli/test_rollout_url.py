"""Calls of the commands to a URL where no gateway is."""

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
