"""Gives a vLLM that is imported already a `Halt`: its worker has the method `halt_at`, for /collective_rpc."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.worker_base import WorkerBase

from tests.sglang_cpu.halt import Halt

_halt = Halt()
"""Of this process, which has the scheduler and the only worker."""

_schedule: Callable[..., Any] = Scheduler.schedule


@functools.wraps(_schedule)
def _halting(self: Any, *arguments: Any, **keywords: Any) -> Any:
    if _halt.is_due({request.request_id: request.num_output_tokens for request in self.running}):
        self.set_pause_state(PauseState.PAUSED_ALL)
    return _schedule(self, *arguments, **keywords)


Scheduler.schedule = _halting
WorkerBase.halt_at = lambda _, samples, tokens: _halt.at(samples, tokens)
