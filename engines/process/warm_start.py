"""Starts engines from the warm process of their environment, of which a node has one. `warm_process.py` is its program.

An engine has the same modules whatever it serves, so importing them is done once for all starts of a node: most of a
restart was that. An address names the warm process, so that any owner finds it, and it outlives each of them.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from engines.inside_vllm.plugin import STANDBY
from engines.process.warm_process import LARGEST_ORDER, peer_user, refusal

_OF_ONE_ENGINE = ("CUDA_VISIBLE_DEVICES", STANDBY)
"""Variables in which engines of one warm process may differ: no module reads them when it is imported."""
_STARTS_WAITING = 128
_TRIES = 200
_CODE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Preload:
    """The `modules` of an engine that a warm process imports, and the engine's `release`."""

    modules: Sequence[str]
    release: str


class WarmProcess:
    """The warm process of one environment, from the view of an owner of engines."""

    def __init__(self, python: str, preload: Preload, env: Mapping[str, str]) -> None:
        self._argv = [python, "-m", "engines.process.warm_process"]
        self._modules = preload.modules
        self._env = {name: value for name, value in env.items() if name not in _OF_ONE_ENGINE}
        self._own = {name: value for name, value in env.items() if name in _OF_ONE_ENGINE}
        # An address belongs to the network namespace, which containers with other files may share.
        where = [os.getuid(), os.path.basename(os.path.realpath("/proc/self/ns/mnt")), os.getcwd()]
        # Code that has changed, or packages that were upgraded in place, need a process that imports them.
        packages = Path(python).absolute().parent.parent.glob("lib*/python3*/*-packages")
        changed = [*_CODE.rglob("*.py"), *packages]
        what = [python, *preload.modules, preload.release, max(path.stat().st_mtime_ns for path in changed)]
        key = json.dumps([where, what, sorted(self._env.items())])
        self._address = f"\0rollout-gateway-warm-{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def _ensure(self, log: IO[bytes]) -> None:
        """Have one begin to import, into `log`, if none is running. Blocks for a tenth of a second."""
        with _socket() as listener:
            try:
                listener.bind(self._address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return
                raise
            listener.listen(_STARTS_WAITING)
            argv = [*self._argv, str(listener.fileno()), *self._modules]
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [listener.fileno()]}
            subprocess.run(argv, env=self._env, start_new_session=True, check=False, **files)  # type: ignore[call-overload]

    async def guard(self, words: Sequence[str], log: BinaryIO, grace_s: float) -> "WarmGuard | None":
        """Return the guard of a new engine, `words` being its module and arguments; None where there is none.

        Waits while a new warm process imports the engine.
        """
        order = json.dumps([words, self._own, grace_s]).encode()
        if len(order) > LARGEST_ORDER:
            return None
        with contextlib.suppress(FileNotFoundError):
            log.write(f"{refusal(self._address).read_text()}\n".encode())
            log.flush()
            return None
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_socket())
            try:
                await asyncio.to_thread(self._ensure, log)
                for _ in range(_TRIES):  # another owner may have bound it, and not listen yet
                    if not connection.connect_ex(self._address):
                        break
                    await asyncio.sleep(0.01)
                if peer_user(connection) != os.getuid():
                    return None
                reader, writer = os.pipe()
                stdin = undo.enter_context(os.fdopen(writer, "wb"))
                with os.fdopen(reader, "rb"):
                    socket.send_fds(connection, [order], [reader, log.fileno()])
                connection.setblocking(False)
                pid = await asyncio.get_running_loop().sock_recv(connection, 32)
            except OSError:
                return None
            if not pid:
                return None
            undo.pop_all()
            return WarmGuard(int(pid), stdin, connection)


class WarmGuard:
    """A guard that is a fork of a warm process, as `subprocess.Popen` shows it."""

    def __init__(self, pid: int, stdin: BinaryIO, connection: socket.socket) -> None:
        self.pid = pid
        self.stdin = stdin
        self._connection = connection
        self._code = -signal.SIGKILL
        self._has_ended = False

    def poll(self) -> int | None:
        """Return its exit code, which it sends before its end; None while it runs."""
        while not self._has_ended:
            try:
                code = self._connection.recv(32)
            except BlockingIOError:
                return None
            except OSError:
                code = b""
            if code:
                self._code = int(code)
            else:
                self._has_ended = True
                self._connection.close()
        return self._code

    def wait(self, timeout_s: float) -> int:
        while (code := self.poll()) is None:
            readable = select.poll()
            readable.register(self._connection, select.POLLIN)
            if not readable.poll(timeout_s * 1000):
                raise subprocess.TimeoutExpired("guard", timeout_s)
        return code


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
