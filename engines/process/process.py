"""A guarded child process with a log file."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import structlog

from engines.process.engine_log import read_tail
from engines.process.guard import descendants
from engines.process.warm_start import Preload, WarmGuard, WarmProcess
from engines.types import MARK

log = structlog.get_logger()

_OUR_PREFIX = "ROLLOUT_GATEWAY_"
_KILLED_END_WITHIN_S = 35.0
"""A process that a driver holds cannot be killed; the stop of a replica does not wait for it for ever."""
_LOOK_S = 0.02
_KEYS = ("ROLLOUT_API_KEY", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line. `env` is laid over the owner's environment, less `hidden` variables and our own keys.

    With `preload` it is `PYTHON -m MODULE ...`, and may be a fork of a process that has imported that.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    hidden: Sequence[str] = ()
    preload: Preload | None = None


class _LoggedProcess:
    """A command in a session of its own, whose output goes into a log file."""

    def __init__(self, command: Command, log_path: Path) -> None:
        self.log_path = log_path
        self._command = command

    def _run(self, argv: Sequence[str], stdin: int) -> "subprocess.Popen[bytes]":
        with self._opened_log() as written:
            return subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return {**_inherited(self._command.hidden), **self._command.env}

    def _opened_log(self) -> BinaryIO:
        """Open the log with the command as its first line. Its owner alone may read it: engines write requests that
        they fail with."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        written = os.fdopen(os.open(self.log_path, flags, 0o600), "ab")
        written.write(f"{time.strftime('%F %T')} {' '.join(self._command.argv)}\n".encode())
        written.flush()
        return written

    def log_tail(self) -> str:
        """Return the last 1 MiB of the log; "" where it cannot be read, as after somebody has removed it: the failure
        that it is read for has to be told."""
        try:
            return read_tail(self.log_path)
        except OSError:
            return ""

    def last_words(self, lines: int = 20) -> str:
        """Return the last `lines` of the log; "" where it cannot be read."""
        return "\n".join(self.log_tail().splitlines()[-lines:])


class LastingProcess(_LoggedProcess):
    """Runs a command that outlives this process, or takes over one that runs already, as `pid`."""

    def __init__(self, command: Command, log_path: Path, pid: int = 0) -> None:
        super().__init__(command, log_path)
        self.pid = pid
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._child = self._run(self._command.argv, subprocess.DEVNULL)
        self.pid = self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 0 for one that was taken over, and has ended."""
        if self._child is not None:
            return self._child.poll()
        try:
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return 0
        return None if words[:-1] == [word.encode() for word in self._command.argv] else 0

    async def stop(self) -> None:
        """End it, and wait for its end."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_END_WITHIN_S):
                while self.exit_code is None:  # noqa: ASYNC110 no process tells of the end of another's child
                    await asyncio.sleep(_LOOK_S)


class EngineProcess(_LoggedProcess):
    """Runs a command under `engines.process.guard`, so that it ends with this process, also on SIGKILL."""

    def __init__(self, command: Command, log_path: Path, stop_timeout_s: float) -> None:
        super().__init__(replace(command, env={**command.env, MARK: "1"}), log_path)
        self._stop_timeout_s = stop_timeout_s
        self._guard: subprocess.Popen[bytes] | WarmGuard | None = None
        self._tree: list[int] = []

    async def start_warm(self) -> bool:
        """Start it as a fork of the warm process of its environment, which is started if there is none. Return False
        where that is not possible: then nothing was started."""
        if self._command.preload is None:
            return False
        python, _, *words = self._command.argv
        warm = await asyncio.to_thread(WarmProcess, python, self._command.preload, self._environment())
        with self._opened_log() as written:
            self._guard = await warm.guard(words, written, self._stop_timeout_s)
        if self._guard is None:
            log.warning("an engine starts without its warm process, and imports by itself", log=str(self.log_path))
        return self._guard is not None

    def start(self) -> None:
        guarded = [sys.executable, "-m", "engines.process.guard", str(self._stop_timeout_s), *self._command.argv]
        self._guard = self._run(guarded, subprocess.PIPE)

    @property
    def pid(self) -> int:
        """Process id of the guard, 0 before the start."""
        return self._guard.pid if self._guard else 0

    @property
    def engine_pid(self) -> int:
        """Process id of the command itself: the first child of the guard; 0 where it does not run."""
        return _first_child(self.pid)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._guard.poll() if self._guard else None

    async def ends_within(self, seconds: float) -> bool:
        """Return True once it has ended, False if it still runs after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < deadline:  # noqa: ASYNC110 a fork of another is no child
            await asyncio.sleep(_LOOK_S)
        return self.exit_code is not None

    @property
    def is_stopped(self) -> bool:
        """True while SIGSTOP holds one of the engine's processes. Asked once it is ready: these are listed at the first
        time alone, as that reads all of the machine's. One that a debugger or a profiler holds is not meant: they
        mostly do for a moment."""
        self._tree = self._tree or descendants(self.pid)
        return any(_words(f"/proc/{pid}/stat", after=")")[:1] == ["T"] for pid in self._tree)

    def kill(self) -> None:
        """Kill the command's processes. The guard sees their end."""
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # `pkill -STOP -f vllm` has stopped the guard too

    async def stop(self) -> None:
        """End the whole process tree and wait for its end: the successor needs its port and GPU memory."""
        if self._guard is None or self._guard.stdin is None:
            return
        self._guard.stdin.close()
        try:
            await asyncio.to_thread(self._guard.wait, longest_stop_s(self._stop_timeout_s))
        except subprocess.TimeoutExpired:
            log.warning("processes of an engine do not end, though they were killed", guard=self.pid)


def longest_stop_s(stop_timeout_s: float) -> float:
    """Return the longest time that `EngineProcess.stop` takes."""
    return stop_timeout_s + _KILLED_END_WITHIN_S


def _inherited(hidden: Sequence[str]) -> dict[str, str]:
    """Return our environment without keys: an engine runs code that comes with a model, and needs none of them."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and name not in _KEYS and not name.startswith(_OUR_PREFIX)
    }


def _first_child(pid: int) -> int:
    """Return the oldest child of a process, 0 where there is none. Orphans that it adopts come after its own."""
    return int(next(iter(_words(f"/proc/{pid}/task/{pid}/children")), 0))


def _words(path: str, after: str = "") -> list[str]:
    """Return the words of a process's file, after the last `after`; none once it has ended."""
    try:
        text = Path(path).read_text()
    except OSError:
        return []
    return text[text.rfind(after) + 1 :].split() if after else text.split()
