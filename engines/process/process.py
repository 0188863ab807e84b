"""A guarded child process with a log file."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import structlog

from engines.process.engine_log import read_tail
from engines.process.process_tree import descendants, has_ended

log = structlog.get_logger()

# Marks the environment of every process of one start, whatever session it is in.
MARK = "ROLLOUT_GATEWAY_ENGINE"
_OUR_PREFIX = "ROLLOUT_GATEWAY_"
# The guard needs a moment after the engine's grace time.
_GUARD_ENDS_WITHIN_S = 5.0
_KILLED_END_WITHIN_S = 30.0
"""A process that a driver holds cannot be killed; the stop of a replica does not wait for it for ever."""
_KEYS = ("ROLLOUT_API_KEY", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line. `env` is laid over the owner's environment, less `hidden` variables and our own keys."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    hidden: Sequence[str] = ()


class _LoggedProcess:
    """A command in a session of its own, whose output goes into a log file."""

    def __init__(self, command: Command, log_path: Path) -> None:
        self.log_path = log_path
        self._command = command

    def _run(self, argv: Sequence[str], stdin: int, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with self._opened_log() as written:
            return subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**_inherited(self._command.hidden), **self._command.env, **env},
                start_new_session=True,
            )

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
        self._child = self._run(self._command.argv, subprocess.DEVNULL, {})
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
                    await asyncio.sleep(0.02)


class EngineProcess(_LoggedProcess):
    """Runs a command under `engines.process.guard`, so that it ends with this process, also on SIGKILL."""

    def __init__(self, command: Command, log_path: Path, stop_timeout_s: float) -> None:
        super().__init__(command, log_path)
        self._stop_timeout_s = stop_timeout_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._mark = uuid.uuid4().hex
        self._killed: set[int] = set()

    def start(self) -> None:
        guarded = [sys.executable, "-m", "engines.process.guard", str(self._stop_timeout_s), *self._command.argv]
        self._guard = self._run(guarded, subprocess.PIPE, {MARK: self._mark})

    @property
    def pid(self) -> int:
        """Process id of the guard, 0 before the start."""
        return self._guard.pid if self._guard else 0

    @property
    def engine_pid(self) -> int:
        """Process id of the command itself: the first child of the inner guard; 0 where it does not run."""
        inner = _first_child(self.pid)
        return _first_child(inner)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._guard.poll() if self._guard else None

    async def stop(self) -> None:
        """End the whole process tree and wait for its end."""
        if self._guard is None or self._guard.stdin is None:
            return
        self._guard.stdin.close()
        try:
            await asyncio.to_thread(self._guard.wait, self._stop_timeout_s + _GUARD_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if left := await self.end_remains(_KILLED_END_WITHIN_S):
            log.warning("processes of an engine do not end, though they were killed", pids=left)

    async def end_remains(self, within_s: float) -> list[int]:
        """Kill what a killed guard has left, and wait for its end; return the process ids that have not ended in
        time."""
        await asyncio.to_thread(_end_marked, self._mark, self._killed, within_s)
        return sorted(self._killed)


def longest_stop_s(stop_timeout_s: float) -> float:
    """Return the longest time that `EngineProcess.stop` takes."""
    return stop_timeout_s + _GUARD_ENDS_WITHIN_S + _KILLED_END_WITHIN_S


def _inherited(hidden: Sequence[str]) -> dict[str, str]:
    """Return our environment without keys: an engine runs code that comes with a model, and needs none of them."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and name not in _KEYS and not name.startswith(_OUR_PREFIX)
    }


def _first_child(pid: int) -> int:
    """Return the oldest child of a process, 0 where there is none. Orphans that it adopts come after its own."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return int(children[0]) if children else 0


def _end_marked(mark: str, killed: set[int], within_s: float) -> None:
    """Kill processes left by a killed guard, and wait for their end: their port and GPU memory are needed by the
    successor. `killed` keeps those that have not ended."""
    deadline = time.monotonic() + within_s
    while True:
        # A process that gives its memory back has no environment: its mark is not found again.
        killed |= _kill_marked(mark)
        killed -= {pid for pid in set(killed) if has_ended(pid)}  # a copy, since a check and a stop may run at once
        if not killed or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _kill_marked(mark: str) -> set[int]:
    """Send SIGKILL to the processes of a start, and to those below them; return their process ids."""
    sought, marked, killed = f"{MARK}={mark}".encode(), set[int](), set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if sought in (process / "environ").read_bytes().split(b"\0"):
                marked.add(int(process.name))
    # Before the first signal: those below a process are another's once it ends.
    for pid in marked | set(descendants(*marked)):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return killed
