"""Notes which calls of engines the gateway makes, and waits for what comes of them; reads an engine's stream."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

import orjson
import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.engine import Engine, Json


async def chunks_of(engine: Engine, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
    """Yield the chunks of a stream."""
    async with aclosing(engine.events(path, body, timeout_s)) as blocks:
        async for events in blocks:
            for event in events:
                yield orjson.loads(event)


def note_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Return the names of these methods of engines, in the order in which they are called from now on."""
    made: list[str] = []

    def noted(name: str) -> Callable[..., Awaitable[None]]:
        method = getattr(VllmEngine, name)

        async def call(self: VllmEngine, *args: Any, **named: Any) -> Any:
            made.append(name)
            return await method(self, *args, **named)

        return call

    for name in names:
        monkeypatch.setattr(VllmEngine, name, noted(name))
    return made


async def until(read: Callable[[], Any], is_so: Callable[[Any], bool] = bool, timeout_s: float = 30.0) -> None:
    """Return as soon as what `read` gives `is_so`. An awaitable that it gives is awaited."""
    async with asyncio.timeout(timeout_s):
        while not is_so(await found if isawaitable(found := read()) else found):
            await asyncio.sleep(0.01)
