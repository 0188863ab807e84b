"""Ports of servers: free, below the kernel's own, and held by one start of a machine."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engines.errors import EngineStartFailed
from engines.process import port
from engines.process.port import HeldPort, free_port

HOLDS = """
import sys
from engines.process import port
port._PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
held = port.HeldPort()
print(held.number, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> int:
    """The only port that can be drawn."""
    number = free_port()
    monkeypatch.setattr(port, "_PORTS", range(number, number + 1))
    return number


@pytest.fixture
def holder(only: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the port."""
    command = [sys.executable, "-c", HOLDS, str(only)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == only
        yield process
        process.kill()


def test_a_port_that_is_bound_is_not_drawn(only: int) -> None:
    with socket.socket() as another:
        another.bind(("127.0.0.1", only))
        with pytest.raises(EngineStartFailed, match="free on this machine"):
            HeldPort()
    assert free_port() == only


def test_a_port_of_another_process_is_not_drawn_until_that_is_killed(
    only: int, holder: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(EngineStartFailed, match="free on this machine"):
        HeldPort()
    holder.kill()
    holder.wait()
    assert free_port() == only
