"""The relay's process as a fork of one that has loaded torch already, which takes two seconds of CPU."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from engines.process.process import Command, LastingProcess

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["engines.transfer.relay"])


class ForkedRelay(LastingProcess):
    """Stands where `LastingProcess` does."""

    def __init__(self, command: Command, log_path: Path, pid: int = 0) -> None:
        super().__init__(command, log_path, pid)
        assert list(command.argv[1:3]) == ["-m", "engines.transfer.relay"]
        self._process = _FORKS.Process(target=_run, args=(command.argv[3:], dict(command.env), log_path))

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs, also where another gateway has started it."""
        return self._process.exitcode if self._process.pid else (None if Path(f"/proc/{self.pid}").exists() else 0)

    async def stop(self) -> None:
        if self._process.pid:
            self._process.kill()
            self._process.join()
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _run(arguments: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
    from engines.transfer import relay

    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(env)
    sys.argv[1:] = arguments
    relay.main()
