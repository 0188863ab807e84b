"""Warm process: has imported an engine, and starts engines as forks of itself, which import nothing again.

    python -m engines.process.warm_process LISTENER MODULE...

Standard library only, until it imports the modules; they may not touch a GPU. LISTENER is the descriptor of a UNIX
socket. Each connection is one start: an `Order` with its two descriptors comes in; the process id of the guard and, at
its end, its exit code go out. The fork is the guard, in a session of its own, and the engine is a fork of the guard: it
ends with the guard, as any engine does, and does not end with the warm process. Without children the warm process ends
by itself.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from engines.process.guard import guard
from engines.process_tree import end_with_parent

LARGEST_ORDER = 1 << 17
_CREDENTIALS = struct.Struct("3i")
_SENT_WITHIN_S = 5.0
_KEPT_S = 30.0
"""It waits so long for a start without children: the successor of a killed engine comes within seconds."""
_CUDA_NOT_INITIALIZED = 3
_NO_BUILDS = "HUMMING_DISABLE_PARALLEL_BUILD"
"""humming, which vLLM imports on GPUs, else builds in the background as it is imported, with a thread for each build.
Without that it builds when it needs what it builds."""


def main() -> int:
    listener, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    if os.fork():
        os._exit(0)  # an orphan from now on: Ray ends the children of a replica with it
    _import(modules)
    if reason := unfit():
        told = f"engines start cold: {reason}"
        print(told, file=sys.stderr, flush=True)
        with suppress(OSError):
            refusal(listener.getsockname().decode()).write_text(told)
        return 1
    gc.collect()
    gc.freeze()  # a collection would write to pages that are shared with all forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps guards
    while (connection := _accepted(listener)) is not None:
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_guarded(connection))  # the modules' own ends are for engines
        connection.close()
    return 0


def refusal(address: str) -> Path:
    """Return the file in which the warm process of an address leaves why it cannot be one, so that one alone tries."""
    return Path(tempfile.gettempdir(), f"{address[1:]}-cold")


def _import(modules: Sequence[str]) -> None:
    was_set = _NO_BUILDS in os.environ
    os.environ.setdefault(_NO_BUILDS, "1")
    for name in modules:
        with suppress(ModuleNotFoundError):  # another release of the engine
            importlib.import_module(name)
    if not was_set:
        del os.environ[_NO_BUILDS]  # engines may


def unfit() -> str:
    """Return the reason why no engine may be a fork of this process; "" if it may."""
    if threading.active_count() > 1:
        return f"its modules have started threads: {[thread.name for thread in threading.enumerate()]}"
    try:
        state = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except OSError:
        return ""  # no driver
    return "" if state == _CUDA_NOT_INITIALIZED else "its modules have initialized CUDA"


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a UNIX socket."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def _accepted(listener: socket.socket) -> socket.socket | None:
    """Return the next start, None once there were no children and no start for a while."""
    listener.settimeout(_KEPT_S)
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            if peer_user(connection) == os.getuid():
                return connection
            connection.close()
            continue
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None


def _guarded(connection: socket.socket) -> int:
    """Run the guard of one engine."""
    os.setsid()
    connection.settimeout(_SENT_WITHIN_S)
    order, (owner, log), _, _ = socket.recv_fds(connection, LARGEST_ORDER, 2)
    for source, target in ((owner, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(owner)
    os.close(log)
    words, env, grace_s = json.loads(order)
    os.environ.update(env)
    try:
        connection.send(str(os.getpid()).encode())
    except OSError:  # its owner has gone meanwhile
        return 1
    code = guard(lambda: _Engine(words, connection), grace_s)
    with suppress(OSError):  # its owner has gone
        connection.send(str(code).encode())
    return code


class _Engine:
    """The engine as `subprocess.Popen` shows it. Its constructor returns in the guard alone: in the fork it ends with
    the `SystemExit` or the error of the engine's program."""

    def __init__(self, words: Sequence[str], connection: socket.socket) -> None:
        self._code: int | None = None
        guard_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            connection.close()
            end_with_parent()
            if os.getppid() != guard_pid:  # it has been killed already
                os._exit(1)
            _become(words)

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)

    def wait(self) -> int:
        code = self._waited(0)
        assert code is not None
        return code

    def _waited(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _become(words: Sequence[str]) -> None:
    """Run `MODULE ARGUMENT...` as `python -m` does, and end."""
    os.setsid()
    # Handlers and readable signals are the guard's, as is the folder that it has not yet moved to.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv[1:] = words[1:]
    sys.modules.pop(words[0], None)  # `python -m` would warn of it
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
