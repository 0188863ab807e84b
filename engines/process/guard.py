"""Process guard: ends an engine with its owner. `python -m engines.process.guard GRACE_S COMMAND...`

Standard library only, since any Python may run it.

The guard runs the command in its own session. It ends the whole process tree when the pipe on standard input closes,
which the kernel does also after SIGKILL of the owner. Its exit code is the command's, or 128 + signal number.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    # Engines start workers, some in their own sessions. As subreaper the guard becomes the parent of each orphan, so
    # that its descendants are always the whole tree.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _signals_as_readable(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, 9)
    )
    code = _wait_for_end(child, wakeup)
    _end_tree(child, grace_s)
    code = child.returncode if code is None else code
    return code if code >= 0 else 128 - code


def _wait_for_end(child: "subprocess.Popen[bytes]", wakeup: int) -> int | None:
    """Return the child's exit code, or None if the owner ended or requested the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 64)
                if key.fd != wakeup and not data:
                    return None
                if key.fd == wakeup and set(data) & {signal.SIGTERM, signal.SIGINT}:
                    return None
            if (code := child.poll()) is not None:
                return code


def _end_tree(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Send SIGTERM to the child, and SIGKILL to the rest of the tree after `grace_s`."""
    deadline = time.monotonic() + grace_s
    if child.poll() is None:
        child.terminate()
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    while alive := _descendants(os.getpid()):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    child.wait()  # before the others, to get its exit code
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(root: int) -> list[int]:
    """Return descendant process ids of `root` that are not zombies."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _signals_as_readable(*signals: signal.Signals) -> int:
    """Return a descriptor on which each of these signals arrives as one byte."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reader


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


if __name__ == "__main__":
    sys.exit(main())
