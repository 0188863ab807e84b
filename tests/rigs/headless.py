"""A process whose first thread ends, at once or at SIGUSR1, while another holds its port and its memory, as those of an
engine that was killed do. `python headless.py FILE at-once|at-signal` writes its process id and its port to FILE."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_ENDS_AFTER_S = 60.0
_SOON_S = 30.0


@dataclass(frozen=True, slots=True)
class Headless:
    """Such a process as a test sees it."""

    pid: int
    port: int

    @classmethod
    def of(cls, file: Path) -> "Headless":
        """Return the process that writes this file."""
        _wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
        return cls(*map(int, file.read_text().split()))

    def wait_for_its_first_thread(self) -> None:
        stat = Path(f"/proc/{self.pid}/stat")
        _wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")

    def holds_its_port(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def command(file: Path, when: str) -> list[str]:
    return [sys.executable, __file__, str(file), when]


def _wait_for(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SOON_S
    while not is_reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def _end_thread(*_: object) -> None:
    ctypes.CDLL(None).pthread_exit(None)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    signal.signal(signal.SIGUSR1, _end_thread)
    threading.Thread(target=time.sleep, args=(_ENDS_AFTER_S,)).start()
    Path(sys.argv[1]).write_text(f"{os.getpid()} {listener.getsockname()[1]}\n")
    if sys.argv[2] == "at-once":
        _end_thread()
    time.sleep(_ENDS_AFTER_S)


if __name__ == "__main__":
    main()
