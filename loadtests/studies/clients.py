"""Client processes for closed-loop load: they encode before a run and parse after it."""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import aiohttp
import orjson
import uvloop

from loadtests.own_process import OwnProcess
from loadtests.report.timeline import Timeline
from loadtests.workloads import Workload

_PATH = "/v1/completions"
_READY_TIMEOUT_S = 60.0
_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One caller: sends a request per seed to `url`, each after the answer to the one before."""

    url: str
    workload: Workload
    seeds: tuple[str, ...]


@dataclass(slots=True)
class Outcome:
    """The result of one run. Times are on the clock shared by all processes of a host."""

    began: float
    ended: float
    cpu_s: float = 0.0
    completions: int = 0
    tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The outcomes of all client processes of a run. `client_busy` is the busiest one's share of a core."""

    wall_s: float
    completions: int
    tokens: int
    median_latency_s: float
    p99_latency_s: float
    client_busy: float
    errors: list[str]


@dataclass(frozen=True, slots=True)
class _Exchange:
    stream: Stream
    seconds: float
    status: int
    content: bytes


class ClientPool(AbstractContextManager["ClientPool"]):
    """Client processes that are kept over many runs."""

    def __init__(self, num_clients: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._clients = [OwnProcess(_serve, timeout_s) for _ in range(num_clients)]

    def __exit__(self, *_: object) -> None:
        """End the client processes."""
        for client in self._clients:
            client.kill()

    def run(self, streams: Sequence[Stream]) -> list[Outcome]:
        """Run all streams at once, spread over the processes; return an outcome per process used."""
        busy = self._clients[: len(streams)]
        for first, client in enumerate(busy):
            client.pipe.send(streams[first :: len(busy)])
        for client in busy:
            client.receive(_READY_TIMEOUT_S)
        for client in busy:
            client.pipe.send("go")
        # The clients' timeouts end a blocked run; parsing its replies takes a moment more.
        return [client.receive(self._timeout_s + _READY_TIMEOUT_S) for client in busy]


def total(outcomes: Sequence[Outcome]) -> Totals:
    """Return the totals from the first request to the last reply, over all processes."""
    latencies = sorted(latency for outcome in outcomes for latency in outcome.latencies_s) or [0.0]
    return Totals(
        wall_s=max(outcome.ended for outcome in outcomes) - min(outcome.began for outcome in outcomes),
        completions=sum(outcome.completions for outcome in outcomes),
        tokens=sum(outcome.tokens for outcome in outcomes),
        median_latency_s=statistics.median(latencies),
        p99_latency_s=latencies[math.ceil(0.99 * len(latencies)) - 1],
        client_busy=max(outcome.cpu_s / (outcome.ended - outcome.began) for outcome in outcomes),
        errors=[error for outcome in outcomes for error in outcome.errors],
    )


def _serve(pipe: Connection, timeout_s: float) -> None:
    """Run one client process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            try:
                streams: list[Stream] = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            bodies = [_encode(stream) for stream in streams]
            pipe.send("ready")
            pipe.recv()
            pipe.send(runner.run(_drive(streams, bodies, timeout_s)))


def _encode(stream: Stream) -> list[bytes]:
    return [orjson.dumps(stream.workload.request(seed)) for seed in stream.seeds]


async def _drive(streams: Sequence[Stream], bodies: Sequence[Sequence[bytes]], timeout_s: float) -> Outcome:
    exchanges: list[_Exchange] = []
    errors: list[str] = []
    cpu = time.process_time()
    # A session per run: a server may have closed connections that were idle during another side's run.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=_READ_BUFFER_BYTES,
        headers={"Content-Type": "application/json"},
    ) as session:
        began = time.monotonic()
        callers = [_call(session, stream, sent, exchanges) for stream, sent in zip(streams, bodies, strict=True)]
        for result in await asyncio.gather(*callers, return_exceptions=True):
            if isinstance(result, BaseException):
                errors.append(f"{type(result).__name__}: {result}")
        ended = time.monotonic()
    outcome = Outcome(began, ended, cpu_s=time.process_time() - cpu, errors=errors)
    for exchange in exchanges:
        _count(exchange, outcome)
    return outcome


async def _call(
    session: aiohttp.ClientSession, stream: Stream, bodies: Sequence[bytes], exchanges: list[_Exchange]
) -> None:
    for body in bodies:
        began = time.monotonic()
        async with session.post(stream.url + _PATH, data=body) as response:
            # Joined once: a reply may be megabytes.
            content = b"".join([block async for block in response.content.iter_any()])
        exchanges.append(_Exchange(stream, time.monotonic() - began, response.status, content))


def _count(exchange: _Exchange, outcome: Outcome) -> None:
    try:
        if exchange.status != 200:
            raise ValueError(f"status {exchange.status}: {exchange.content[:300]!r}")
        tokens = tokens_of(exchange.content, exchange.stream.workload)
    except (ValueError, KeyError) as error:
        outcome.errors.append(f"{exchange.stream.url}: {error}")
        return
    outcome.completions += exchange.stream.workload.completions
    outcome.tokens += tokens
    outcome.latencies_s.append(exchange.seconds)


def tokens_of(content: bytes, workload: Workload) -> int:
    """Return the tokens of a reply by the server's count. Raise `ValueError` if completions or tokens are missing: a
    run with losses has no valid speed."""
    timeline = Timeline()
    timeline.feed_whole(content, 0.0)
    tokens: int | None = timeline.usage.get("completion_tokens")
    if not timeline.is_whole or tokens is None:
        raise ValueError(f"no complete reply: ...{content[-200:]!r}")
    if timeline.ended != workload.completions:
        raise ValueError(f"{timeline.ended} completions came, {workload.completions} were requested")
    if tokens != workload.tokens:
        raise ValueError(f"{tokens} tokens came, {workload.tokens} were requested")
    return tokens
