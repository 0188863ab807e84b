"""Notes which calls of engines the gateway makes, and waits for what comes of them."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import pytest

from engines.clients.vllm_engine import VllmEngine


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
