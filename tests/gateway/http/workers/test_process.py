"""The end of a worker process: the folder of the doors goes with the owner, and with nobody else."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

TIMEOUT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "doors"
    folder.mkdir()
    return folder


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket, tuple[int, int]]]:
    """The owner's ends of both sockets, and the descriptors of the worker's."""
    with ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        hands, takes = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        yield ours, hands, (theirs.fileno(), takes.fileno())


@pytest.mark.parametrize("has_owner", [True, False])
def test_a_worker_whose_channel_has_ended_leaves_the_folder_to_an_owner_that_lives(
    folder: Path, ends: tuple[socket.socket, socket.socket, tuple[int, int]], has_owner: bool
) -> None:
    channel, _, descriptors = ends
    command = [sys.executable, "-m", "gateway.http.workers.process", *map(str, descriptors), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=descriptors) as process:
        assert process.stdin is not None
        if not has_owner:
            process.stdin.close()
        channel.shutdown(socket.SHUT_RDWR)
        assert process.wait(TIMEOUT_S) == 1
        assert folder.exists() == has_owner
