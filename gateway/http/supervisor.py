"""Runs background tasks that have to live as long as the gateway, and reports one that ended."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


class Supervisor:
    """Owns background tasks. A task that ends before `stop` is a failure of the gateway, which has to restart."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopping = False
        self.failure = ""
        """The task that ended and its error; "" while all run."""

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    async def stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if self._stopping:
            return
        reason = "it was cancelled" if task.cancelled() else repr(task.exception() or "it returned")
        self.failure = f"background task {task.get_name()!r} ended: {reason}"
        log.error("a background task ended: the gateway has to restart", task=task.get_name(), reason=reason)
