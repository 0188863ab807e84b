"""vLLM on CPU as a fork of a process that has loaded it already, which takes six of the nine seconds of a start."""

import asyncio
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from engines.inside_vllm.plugin import FORK_CORE
from engines.process.guard import end_with_parent, guard
from engines.process.process import Command, EngineProcess
from tests.rigs.engines import halting

_SERVER = "vllm.entrypoints.launchers.api_server.entry"
_FORKS = multiprocessing.get_context("forkserver")
_FORK = multiprocessing.get_context("fork")
_READ_LATE = ("VLLM_", "OMP_", "TORCHDYNAMO_", "ROLLOUT_GATEWAY_")
"""Variables of these names are the same in every start, or are read when it is under way."""
_PRELOADED = [__name__, _SERVER, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "engines.inside_vllm.worker"]


def engine_process(command: Command, log_path: Path, stop_timeout_s: float) -> EngineProcess:
    """A fork where the command is that of a plain vLLM on CPU, else the process that it is in production."""
    is_plain = command.argv[:3] == [sys.executable, "-m", _SERVER] and FORK_CORE in command.env
    is_usual = all(name.startswith(_READ_LATE) for name in command.env)
    return (ForkedVllm if is_plain and is_usual else EngineProcess)(command, log_path, stop_timeout_s)


class ForkedVllm(EngineProcess):
    """A guard and its engine as in production, but for their programs, which no process loads again."""

    def __init__(self, command: Command, log_path: Path, stop_timeout_s: float) -> None:
        super().__init__(command, log_path, stop_timeout_s)
        ours, self._owner = _FORKS.Pipe(duplex=False)
        arguments = (ours, command.argv[3:], dict(command.env), log_path, stop_timeout_s)
        self._forked = _FORKS.Process(target=_guarded, args=arguments)

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        _FORKS.set_forkserver_preload(_PRELOADED)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._command.env.items():
                patch.setenv(name, value)  # what is read when modules load
            self._forked.start()

    @property
    def pid(self) -> int:
        return self._forked.pid or 0

    @property
    def exit_code(self) -> int | None:
        return self._forked.exitcode

    async def stop(self) -> None:
        self._owner.close()
        await asyncio.to_thread(self._forked.join, self._stop_timeout_s + 5)


def _guarded(
    owner: Connection, arguments: Sequence[str], env: Mapping[str, str], log_path: Path, grace_s: float
) -> None:
    """The guard: in a session of its own, with its log, and the pipe of its owner as standard input."""
    os.setsid()
    os.environ.update(env)
    os.dup2(owner.fileno(), sys.stdin.fileno())
    owner.close()
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(guard(lambda: _Child(arguments), grace_s))


class _Child:
    """The engine, as `subprocess.Popen` would show it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = _FORK.Process(target=_serve, args=(arguments,))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _serve(arguments: Sequence[str]) -> None:
    """As `python -m` would, but for the handlers of signals that the guard has, and for `halting`."""
    end_with_parent()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments
    halting.install()
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)
