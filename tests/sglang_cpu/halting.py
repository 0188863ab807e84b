"""An SGLang plugin: /set_internal_state takes `halt_samples` with `halt_tokens`, see `Halt`, and tells `is_paused`."""

import multiprocessing
import sys
from typing import Any

from halt import Halt

_MODULE = "sglang.srt.managers.scheduler"
_halt = Halt()


def register() -> None:
    """SGLang calls this in each process at its start; only workers have a scheduler."""
    if multiprocessing.parent_process() is None or _MODULE not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MODULE}.Scheduler.ingest_requests", ingest_requests, HookType.AFTER)
    HookRegistry.register(f"{_MODULE}.Scheduler.set_internal_state", set_internal_state, HookType.AROUND)


def ingest_requests(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """After it the loop looks whether it is paused."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    running = [request for request in scheduler.running_batch.reqs if not request.finished()]
    if _halt.is_due({request.rid: len(request.output_ids) for request in running}):
        scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))


def set_internal_state(original: Any, scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    match request.server_args:
        case {"halt_samples": samples, "halt_tokens": tokens}:
            _halt.at(samples, tokens)
            return SetInternalStateReqOutput(updated=True)
        case {"is_paused": _}:
            return SetInternalStateReqOutput(updated=scheduler._engine_paused)
    return original(scheduler, request)
