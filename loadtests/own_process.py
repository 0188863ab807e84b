"""A server in a process of its own, and the CPU time that it uses."""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

_START_S = 60.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs, and the processes that work for it."""

    url: str
    pid: int
    others: tuple[int, ...] = ()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its threads since its start, to the nanosecond (ticks of /proc/pid/stat are 10 ms)."""
        threads = (
            thread for pid in (self.pid, *self.others) for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def own_process(run: Callable[..., None], *arguments: object) -> Iterator[Served]:
    """Run a server in a process: `run` takes the arguments and a pipe, sends its URL, and ends with the pipe.

    Raise an error that it sends instead.
    """
    with own_processes(run, [arguments]) as (served,):
        yield served


@contextmanager
def own_processes(run: Callable[..., None], each: Sequence[Sequence[object]]) -> Iterator[list[Served]]:
    """Run a server for each of these arguments, each in a process of its own; all start at once."""
    context = multiprocessing.get_context("spawn")
    running = []
    try:
        for arguments in each:
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(*arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        yield [Served(_url(run, pipe), process.pid or 0) for process, pipe in running]
    finally:
        for _, pipe in running:
            pipe.close()
        for process, _ in running:
            process.join(_STOP_S)
            process.kill()


def _url(run: Callable[..., None], pipe: Connection) -> str:
    if not pipe.poll(_START_S):
        raise TimeoutError(f"{run.__module__} did not start within {_START_S:g} s")
    if isinstance(told := pipe.recv(), Exception):
        raise told
    url: str = told
    return url


async def until_closed(pipe: Connection) -> None:
    """Return when the other end of the pipe closes, also by its process's death."""

    def wait() -> None:
        try:
            pipe.recv()
        except EOFError:
            return

    await asyncio.to_thread(wait)
