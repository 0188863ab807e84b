"""Keeps an engine from outliving its owner: `python -m engines.process.guard GRACE_S COMMAND...`.

Standard library alone, since any Python runs it.

The guard runs the command in a session of its own and ends the whole tree of processes when the owner's end of the
pipe on standard input closes, which the kernel does for an owner that died of SIGKILL too. It exits as the command did,
with 128 and the signal's number where a signal ended that.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Child(Protocol):
    """A process as `subprocess.Popen` shows it."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self) -> int: ...


def main() -> int:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    return guard(
        lambda: subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent),
        grace_s,
    )


def guard(start: Callable[[], Child], grace_s: float) -> int:
    """Runs what `start` starts until it ends or the owner does. Returns its exit code as shells have it."""
    # Engines start workers, some in sessions of their own. As subreaper the guard becomes the parent of each orphan,
    # so that "my descendants" stays the whole tree whatever dies first.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _signals_as_readable(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    child = start()
    _wait_for_end(child, wakeup)
    code = _end_tree(child, grace_s)
    return code if code >= 0 else 128 - code


def end_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_end(child: Child, wakeup: int) -> None:
    """Returns when the child has ended, or its owner has or wants it to end."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 64)
                if key.fd != wakeup and not data:
                    return
                if key.fd == wakeup and set(data) & {signal.SIGTERM, signal.SIGINT}:
                    return
            if child.poll() is not None:
                return


def _end_tree(child: Child, grace_s: float) -> int:
    """SIGTERM to the child, SIGKILL to whatever of the tree is left after the grace. Returns the child's exit code."""
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
    code = child.wait()  # before the others, or its exit code would be lost among theirs
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return code


def _descendants(root: int) -> list[int]:
    """Process ids below `root` that are not zombies."""
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
    """A descriptor on which each of these signals arrives as one byte."""
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
