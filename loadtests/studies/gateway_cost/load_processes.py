"""Processes that ask a server again and again for some seconds, so that no client is the limit."""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Self

import aiohttp
import orjson
import uvloop

from loadtests.studies.gateway_cost.gateway_cpu import Row

_TIMEOUT_S = 300.0
_START_S = 60.0
_BLANKS = str.maketrans("01", " \t")
_HEADERS = {"Content-Type": "application/json"}

Round = tuple[int, float, float]
"""Requests of one process, and its first and last moment on the clock that all processes share."""


class LoadProcesses:
    """Client processes that are kept over many rounds; no two of their requests have equal bodies."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(number)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, itertools.count(index, number)), daemon=True)
            for index, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()
        for pipe in self._pipes:
            _receive(pipe, _START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.terminate()
            process.join()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def run(self, url: str, row: Row, seconds: float) -> tuple[int, float]:
        """Ask for a row with all processes at once; return the number of answers, and the seconds from the first
        request to the last answer."""
        for pipe in self._pipes:
            pipe.send((url, row, seconds))
        rounds: list[Round] = [_receive(pipe, seconds + _TIMEOUT_S) for pipe in self._pipes]
        requests, began, ended = zip(*rounds, strict=True)
        return sum(requests), max(ended) - min(began)


def unlike(data: bytes, number: int) -> bytes:
    """Return a body that differs from those of other numbers, and means the same: equal batches of one client run in
    one process."""
    return data + f"{number:b}".translate(_BLANKS).encode()


def _receive(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a client process said nothing within {timeout_s:g} s")
    if isinstance(said := pipe.recv(), Exception):
        raise said
    return said


def _serve(pipe: Connection, numbers: Iterator[int]) -> None:
    """Run one client process until the pipe closes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(None)
        while True:
            try:
                url, row, seconds = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            try:
                pipe.send(runner.run(_round(url, row, seconds, numbers)))
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


async def _round(url: str, row: Row, seconds: float, numbers: Iterator[int]) -> Round:
    data, asked = orjson.dumps({"model": "sim", **row.body}), 0

    async def caller() -> None:
        nonlocal asked
        while time.monotonic() - began < seconds:
            await _ask(session, url + row.path, unlike(data, next(numbers)))
            asked += 1

    timeout, connector = aiohttp.ClientTimeout(total=_TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    # New connections each time: a gateway spreads them over its workers as they come.
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=_HEADERS) as session:
        began = time.monotonic()
        await asyncio.gather(*(caller() for _ in range(row.at_once)))
        return asked, began, time.monotonic()


async def _ask(session: aiohttp.ClientSession, url: str, data: bytes) -> None:
    async with session.post(url, data=data) as response:
        async for _ in response.content.iter_any():
            pass
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}")
