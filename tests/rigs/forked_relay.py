"""The relay's process as a fork of one that has loaded torch already, which takes two seconds of CPU."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.process.process import Command, EngineProcess

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["engines.transfer.relay"])


class ForkedRelay(EngineProcess):
    """Stands where `EngineProcess` does. It has no guard: `pid` is the relay's own."""

    def __init__(self, command: Command, log_path: Path, stop_timeout_s: float) -> None:
        super().__init__(command, log_path, stop_timeout_s)
        assert list(command.argv[1:3]) == ["-m", "engines.transfer.relay"]
        self._process = _FORKS.Process(target=_run, args=(command.argv[3:], dict(command.env), log_path))

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    async def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _run(arguments: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
    from engines.transfer import relay

    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(env)
    sys.argv[1:] = arguments
    relay.main()
