"""Gives the vLLM of this process a `Halt`, by its import: its worker has the method `halt_at`, for /collective_rpc."""

import functools
from collections.abc import Callable
from typing import Any

from tests.sglang_cpu.halt import Halt

_halt = Halt()
"""Of this process, which has the scheduler and the only worker."""


@functools.cache
def install() -> None:
    """Also the function of a vLLM plugin, for an engine that starts by itself. Once for a process and its forks."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerBase

    schedule: Callable[..., Any] = Scheduler.schedule

    @functools.wraps(schedule)
    def halting(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if _halt.is_due({request.request_id: request.num_output_tokens for request in self.running}):
            self.set_pause_state(PauseState.PAUSED_ALL)
        return schedule(self, *arguments, **keywords)

    Scheduler.schedule = halting
    WorkerBase.halt_at = lambda _, samples, tokens: _halt.at(samples, tokens)


install()
