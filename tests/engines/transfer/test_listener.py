"""The wait for a trainer's listener."""

import socket
import threading
import time

import pytest

from engines.process.port import free_port
from engines.transfer import gloo
from engines.transfer.gloo import until_listening

SOON_S = 30.0


def test_a_trainer_that_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        until_listening("127.0.0.1", server.getsockname()[1])


def test_a_trainer_that_listens_later_is_found() -> None:
    port = free_port()
    opened: list[socket.socket] = []
    later = threading.Timer(0.3, lambda: opened.append(socket.create_server(("127.0.0.1", port))))
    later.start()
    until_listening("127.0.0.1", port, SOON_S)
    later.join()
    opened[0].close()


@pytest.mark.parametrize(("limit_s", "timeout_s"), [(0.1, 300.0), (300.0, 0.1)])
def test_a_trainer_that_never_listens_is_waited_for_no_longer_than_either_limit(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, timeout_s: float
) -> None:
    monkeypatch.setattr(gloo, "LISTENS_S", limit_s)
    port, began = free_port(), time.monotonic()
    with pytest.raises(RuntimeError, match=rf"the trainer does not listen at 127\.0\.0\.1:{port} .*: it has died, or"):
        until_listening("127.0.0.1", port, timeout_s)
    assert time.monotonic() - began < SOON_S
