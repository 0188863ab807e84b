"""A server in a process of its own, and the CPU time that it uses."""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from engines.errors import ConfigError, EngineStartFailed

_START_S = 60.0
_STOP_S = 30.0

Serve = Callable[..., AbstractAsyncContextManager[Any]]
"""Runs a server until the end of the block. It yields what its owner has to know, such as its URL."""


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


class OwnProcess:
    """A spawned process that runs `target` with its end of a pipe and these arguments. It ends with `stop`, and with
    the process that made it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float) -> Any:
        """Return what the process sends next. Raise `TimeoutError`, and `EOFError` if it has ended."""
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"{self.process.name} said nothing within {timeout_s:g} s")
        return self.pipe.recv()

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    async def told(self, timeout_s: float = _START_S) -> Any:
        """Return what the process sends next. Raise an error that it sends, `TimeoutError`, and `EOFError` if it has
        ended."""
        loop, has_come = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.pipe.fileno(), has_come.set)
        try:
            async with asyncio.timeout(timeout_s):
                await has_come.wait()
        finally:
            loop.remove_reader(self.pipe.fileno())
        if isinstance(told := self.pipe.recv(), Exception):
            raise told
        return told

    async def ended(self) -> None:
        """Return when the process has ended."""
        await asyncio.to_thread(self.process.join)

    async def stop(self, timeout_s: float = _STOP_S) -> None:
        """Have the process end; kill one that takes longer."""
        self.pipe.close()
        try:
            await asyncio.to_thread(self.process.join, timeout_s)
        finally:
            self.process.kill()


def serving(serve: Serve, *arguments: object) -> OwnProcess:
    """Return a process that begins to serve with these arguments."""
    return OwnProcess(_run, serve, arguments)


@asynccontextmanager
async def own_process(serve: Serve, *arguments: object) -> AsyncIterator[Served]:
    """Run a server that yields its URL, until the end of the block. Raise its `ConfigError`."""
    process = await asyncio.to_thread(serving, serve, *arguments)
    try:
        yield Served(await process.told(), process.pid)
    finally:
        await process.stop()


def _run(pipe: Connection, serve: Serve, arguments: tuple[object, ...]) -> None:
    """Serve in this process until the other end of the pipe closes, also by its process's death."""
    os.setsid()  # an interrupt from the terminal is its owner's to handle

    async def served() -> None:
        try:
            async with serve(*arguments) as told:
                pipe.send(told)
                with suppress(EOFError):
                    await asyncio.to_thread(pipe.recv)
        except (ConfigError, EngineStartFailed) as error:
            pipe.send(error)

    uvloop.run(served())
