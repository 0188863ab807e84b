"""A batch of prompts in flight: its rollouts as they end, or all at once, and its cancellation."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

from trainer_client.results import Completion, Outcome, Rollout

Failures = Literal["raise", "keep"]
"""`raise`: the first failed prompt ends the batch with its error. `keep`: a failure is a rollout of outcome FAILED."""


RunPrompt = Callable[[int], Coroutine[Any, Any, Rollout]]


class Batch:
    """The rollouts of one call of `generate`, which run from that moment on. Each is delivered once.

    Iterate completions (`async for completion in batch`) or rollouts (`batch.rollouts()`) as they end, or wait for all
    (`await batch.gather()`). The end of an iteration, or a cancelled wait, cancels the rest of the batch; a batch that
    is never iterated runs to its end.
    """

    def __init__(self, request_id: str, num_prompts: int, run: RunPrompt, failures: Failures) -> None:
        self.request_id = request_id
        self.num_prompts = num_prompts
        self._failures = failures
        self._ended: list[Rollout] = []
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[Rollout]] = []
        for index in range(num_prompts):
            task = asyncio.create_task(run(index), name=f"{request_id}-{index}")
            task.add_done_callback(partial(self._settle, index))
            self._tasks.append(task)

    @property
    def is_done(self) -> bool:
        return len(self._ended) == self.num_prompts

    async def __aiter__(self) -> AsyncGenerator[Completion]:
        rollouts = self.rollouts()
        try:
            async for rollout in rollouts:
                for completion in rollout.completions:
                    yield completion
        finally:
            await rollouts.aclose()

    async def rollouts(self) -> AsyncGenerator[Rollout]:
        """Yield rollouts as they end, also failed and cancelled ones; raise the first failure if failures="raise"."""
        try:
            for place in range(self.num_prompts):
                while len(self._ended) <= place:
                    self._news.clear()
                    await self._news.wait()
                rollout = self._ended[place]
                if rollout.error is not None and self._failures == "raise":
                    raise rollout.error
                yield rollout
        finally:
            self.cancel()

    async def gather(self) -> list[Rollout]:
        """Return all rollouts, in the order of their prompts."""
        return sorted([rollout async for rollout in self.rollouts()], key=lambda rollout: rollout.prompt_index)

    def cancel(self, prompt_index: int | None = None) -> None:
        """Cancel one prompt, or all; their engines stop."""
        tasks: Sequence[asyncio.Task[Rollout]] = self._tasks
        if prompt_index is not None:
            if not 0 <= prompt_index < self.num_prompts:
                raise IndexError(f"prompt_index = {prompt_index}: this batch has {self.num_prompts} prompts")
            tasks = [self._tasks[prompt_index]]
        for task in tasks:
            task.cancel()

    async def aclose(self) -> None:
        """Cancel all prompts and wait for their end."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "Batch":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _settle(self, index: int, task: "asyncio.Task[Rollout]") -> None:
        """Record the end of a prompt, also of a task that never began to run."""
        if task.cancelled():
            rollout = self._without_completions(index, Outcome.CANCELLED)
        elif error := task.exception():
            if not isinstance(error, Exception):
                raise error
            rollout = self._without_completions(index, Outcome.FAILED, error)
        else:
            rollout = task.result()
        self._ended.append(rollout)
        self._news.set()

    def _without_completions(self, index: int, outcome: Outcome, error: Exception | None = None) -> Rollout:
        return Rollout(
            request_id=f"{self.request_id}-{index}",
            prompt_index=index,
            outcome=outcome,
            error=error,
        )
