"""The control plane beside a gateway that gives no answer."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException, Response

from gateway import control
from gateway.control import Control


@pytest.mark.parametrize(
    "ask",
    [Control.status, lambda plane: Control.health(plane, Response()), Control.url, Control.targets],
    ids=["status", "health", "url", "targets"],
)
async def test_a_gateway_that_gives_no_answer_is_told_in_time(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[Any], Awaitable[Any]]
) -> None:
    monkeypatch.setattr(control, "_ANSWER_S", 0.01)
    silent = SimpleNamespace(remote=asyncio.Event().wait)
    plane: Any = SimpleNamespace(_gateway=SimpleNamespace(status=silent, url=silent))
    plane.status = partial(Control.status, plane)  # Serve's class around it ends in a coroutine that none awaits
    async with asyncio.timeout(30):
        with pytest.raises(HTTPException, match=r"no answer within 0\.01 s") as caught:
            await ask(plane)
    assert caught.value.status_code == 504
