"""Process guard: ends an engine with its owner. `python -m engines.process.guard GRACE_S COMMAND...`

Standard library only, since any Python may run it.

The guard runs the command in a session of its own. It ends the whole process tree when the pipe on standard input
closes, which the kernel does also after SIGKILL of the owner, and removes what the tree leaves. The exit code is the
command's, or 128 + signal number.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from engines.process_tree import adopt_orphans, end_with_parent

_TRACKERS_END_WITHIN_S = 3.0
_NAME = "rollout-engine-"
# The path of a socket has at most 107 bytes. vLLM's have a UUID in the folder.
_MOST_BYTES = 107 - len(f"/{_NAME}12345678/") - 36
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_SGLANGS_SEGMENTS = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
_MAPPED_WITHIN_S = 1.0
"""An engine maps a segment of shared memory that it has made within this time."""


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
    """Run the child that `start` starts until it ends or the owner does; return its exit code as a shell does."""
    adopt_orphans()  # engines start workers, some in sessions of their own
    folder = _own_folder()
    wakeup = _signals_as_readable(*_WATCHED)
    child = start()
    code = _wait_for_end(child.poll, wakeup)
    ended = _end_tree(child, grace_s)
    remove_left_segments()
    shutil.rmtree(folder, ignore_errors=True)
    code = ended if code is None else code
    return code if code >= 0 else 128 - code


def _own_folder() -> str:
    """Make the folder of the engine's temporary files, such as sockets, which it leaves when it is killed."""
    outer = tempfile.gettempdir()
    place = outer if len(os.fsencode(outer)) <= _MOST_BYTES else "/tmp"
    os.environ["TMPDIR"] = folder = tempfile.mkdtemp(prefix=_NAME, dir=place)
    # torch keeps compiled kernels in the temporary folder; the next start is to find them.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outer}/torchinductor_{os.getuid()}")
    return folder


def _wait_for_end(poll: Callable[[], int | None], wakeup: int) -> int | None:
    """Return the child's exit code, or None when the owner left or sent a signal to end."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while (code := poll()) is None:
            for key, _ in selector.select():
                data = os.read(key.fd, 64)
                if key.fd != wakeup and not data:
                    return None
                if key.fd == wakeup and set(data) & {signal.SIGTERM, signal.SIGINT}:
                    return None
        return code


def _end_tree(child: Child, grace_s: float) -> int:
    """Send SIGTERM to the child, and SIGKILL to the rest of the tree after the grace; return the child's exit code."""
    deadline = time.monotonic() + grace_s
    if child.poll() is None:
        child.terminate()
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    _kill_descendants()
    return child.wait()


def _kill_descendants() -> None:
    """Send SIGKILL to the tree until none is left; for a while not to Python's resource trackers. They end after the
    processes that they track, and remove the shared memory that these have left, such as vLLM's of several workers."""
    deadline = time.monotonic() + _TRACKERS_END_WITHIN_S
    while alive := descendants(os.getpid()):
        may_be_tracker = time.monotonic() < deadline
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                if not (may_be_tracker and _is_tracker(pid)):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """List the processes below this one that have not ended."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        if (parent := _living_parent(process)) is not None:
            children.setdefault(parent, []).append(int(process.name))
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _living_parent(process: Path) -> int | None:
    """Return the parent of a process; None once it has ended.

    Its first thread becomes a zombie at its own end. The other threads may still hold memory, files and ports.
    """
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        if state in "ZX" and len(os.listdir(process / "task")) <= 1:
            return None
    except OSError:
        return None
    return int(parent)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def remove_left_segments(place: Path = Path("/dev/shm")) -> list[Path]:
    """Remove our user's segments that SGLang leaves when it is killed, which is also how it ends its own workers, and
    that no process maps; return them."""
    made_before = time.time() - _MAPPED_WITHIN_S
    left = [path for path in place.glob("*") if path.name.startswith(_SGLANGS_SEGMENTS) and _is_ours(path, made_before)]
    mapped = _mapped() if left else set()
    removed = [path for path in left if str(path) not in mapped]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _is_ours(segment: Path, made_before: float) -> bool:
    with contextlib.suppress(OSError):  # removed in this moment
        status = segment.stat()
        return status.st_uid == os.getuid() and status.st_ctime < made_before
    return False


def _mapped() -> set[str]:
    """List the files that processes of our user map."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            found |= {line.split(maxsplit=5)[-1] for line in maps.read_text(errors="replace").splitlines()}
    return found


def _signals_as_readable(*signals: signal.Signals) -> int:
    """Return a descriptor on which each of these signals arrives as one byte."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reader


if __name__ == "__main__":
    sys.exit(main())
