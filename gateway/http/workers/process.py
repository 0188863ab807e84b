"""A worker as a process: `python -m gateway.http.workers.process CHANNEL HANDED FOLDER`.

It inherits two sockets, for messages and for connections of clients, and gets their descriptors. FOLDER has the doors
between the processes. It ends when its standard input closes, also by its owner's death, and removes the folder then.
"""

import asyncio
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import structlog
import uvloop

from gateway.http.workers.worker import Worker


def main() -> None:
    end, handed = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    owner_ended = partial(_end, sys.argv[3])
    threading.Thread(target=_end_with_owner, args=(owner_ended,), daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Worker(end, handed, owner_ended).run())


def _end_with_owner(owner_ended: Callable[[], NoReturn]) -> None:
    """End this process when its owner has ended, also while its event loop stands still."""
    while os.read(sys.stdin.fileno(), 4096):  # unbuffered: its lock would hold up the end of the interpreter
        pass
    owner_ended()


def _end(folder: str) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
