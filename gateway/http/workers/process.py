"""A worker as a process: `python -m gateway.http.workers.process CHANNEL HANDED FOLDER`.

It inherits two sockets, for messages and for connections of clients, and gets their descriptors. FOLDER has the doors
between the processes. It ends when its standard input closes, also by its owner's death, and removes the folder then.
Where its channel alone has ended, or a task of it has failed, it leaves the folder to the owner, which lives and starts
another worker.
"""

import asyncio
import os
import shutil
import socket
import sys
import threading
import time
from typing import NoReturn

import uvloop

from engines.process.log_lines import write_log_lines
from gateway.http.workers.worker import Worker

_OWNER_FIRST_S = 0.5


def main() -> None:
    channel, handed = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    write_log_lines(sys.stderr)
    threading.Thread(target=_end_with_owner, args=(sys.argv[3],), daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Worker(channel, handed, _end).run())


def _end_with_owner(folder: str) -> NoReturn:
    """End this process when its owner has ended, also while its event loop stands still."""
    while os.read(sys.stdin.fileno(), 4096):  # unbuffered: its lock would hold up the end of the interpreter
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _end() -> NoReturn:
    """End this process, and leave the folder to its owner. If the owner has ended, the thread above is first."""
    time.sleep(_OWNER_FIRST_S)
    os._exit(1)


if __name__ == "__main__":
    main()
