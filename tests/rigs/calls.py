"""Notes which calls of engines the gateway makes."""

from collections.abc import Awaitable, Callable
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
