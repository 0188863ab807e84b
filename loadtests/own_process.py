"""A server in a process of its own, and the CPU time that it uses."""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvloop

from engines.errors import ConfigError

_START_S = 60.0
_STOP_S = 30.0

Serve = Callable[..., AbstractAsyncContextManager[str]]
"""Runs a server, whose URL it yields, until the end of the block."""


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
def own_process(serve: Serve, *arguments: object) -> Iterator[Served]:
    """Run a server in a process, which ends with this one too. Raise its `ConfigError`."""
    with own_processes(serve, [arguments]) as (served,):
        yield served


@contextmanager
def own_processes(serve: Serve, each: Sequence[Sequence[object]]) -> Iterator[list[Served]]:
    """Run a server for each of these arguments, each in a process of its own; all start at once."""
    running = []
    try:
        for arguments in each:
            running.append(begun(serve, *arguments))
        yield [Served(_url(serve, pipe), process.pid or 0) for process, pipe in running]
    finally:
        for _, pipe in running:
            pipe.close()
        for process, _ in running:
            process.join(_STOP_S)
            process.kill()


def begun(serve: Serve, *arguments: object) -> tuple[BaseProcess, Connection]:
    """Begin to run a server. Its URL comes by the pipe, whose end here is to be closed to end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(serve, arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _url(serve: Serve, pipe: Connection) -> str:
    if not pipe.poll(_START_S):
        raise TimeoutError(f"{serve.__module__} did not start within {_START_S:g} s")
    if isinstance(told := pipe.recv(), ConfigError):
        raise told
    url: str = told
    return url


def _run(serve: Serve, arguments: Sequence[object], pipe: Connection) -> None:
    """Serve in this process until the other end of the pipe closes, also by its process's death."""

    async def served() -> None:
        try:
            async with serve(*arguments) as url:
                pipe.send(url)
                with suppress(EOFError):
                    await asyncio.to_thread(pipe.recv)
        except ConfigError as error:
            pipe.send(error)

    uvloop.run(served())
