"""A batch of prompts in flight: its rollouts as they end, or all at once, and its cancellation."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from trainer_client.results import Completion, Rollout

Failures = Literal["raise", "keep"]
"""`raise`: the first failed prompt ends the batch with its error. `keep`: a failure is a rollout with an `error`."""


class Batch:
    """The rollouts of one call of `generate`, which run from that moment on. Each is delivered once.

    Iterate completions (`async for completion in batch`) or rollouts (`batch.rollouts()`) as they end, or wait for all
    (`await batch.gather()`). The end of an iteration, or a cancelled wait, cancels the rest of the batch; a batch that
    is never iterated runs to its end.
    """

    def __init__(
        self, num_prompts: int, run: Callable[[int], Coroutine[Any, Any, Rollout]], failures: Failures
    ) -> None:
        self._failures = failures
        self._ended: list[Rollout | None] = []
        """In the order of their ends; None for one that was cancelled."""
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(run(index), name=f"prompt {index}") for index in range(num_prompts)]
        for index, task in enumerate(self._tasks):
            task.add_done_callback(partial(self._settle, index))

    @property
    def is_done(self) -> bool:
        return len(self._ended) == len(self._tasks)

    async def __aiter__(self) -> AsyncGenerator[Completion]:
        async with aclosing(self.rollouts()) as rollouts:
            async for rollout in rollouts:
                for completion in rollout.completions:
                    yield completion

    async def rollouts(self) -> AsyncGenerator[Rollout]:
        """Yield rollouts as they end, but for cancelled ones; raise the first failure if failures="raise"."""
        try:
            for place in range(len(self._tasks)):
                while len(self._ended) <= place:
                    self._news.clear()
                    await self._news.wait()
                rollout = self._ended[place]
                if rollout is None:
                    continue
                if rollout.error is not None and self._failures == "raise":
                    raise rollout.error
                yield rollout
        finally:
            self.cancel()

    async def gather(self) -> list[Rollout]:
        """Return all rollouts, in the order of their prompts."""
        return sorted([rollout async for rollout in self.rollouts()], key=lambda rollout: rollout.prompt_index)

    def cancel(self) -> None:
        """Cancel the prompts that have not ended; their engines stop."""
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """Cancel, and wait for the end."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _settle(self, index: int, task: "asyncio.Task[Rollout]") -> None:
        """Record the end of a prompt, also of a task that never began to run."""
        if task.cancelled():
            self._ended.append(None)
        elif (error := task.exception()) is None:
            self._ended.append(task.result())
        elif isinstance(error, Exception):
            self._ended.append(Rollout(prompt_index=index, error=error))
        else:
            raise error
        self._news.set()
