"""SGLang plugin: takes the gateway's calls in every worker. `worker.py` answers them.

One method is hooked: the worker's end of `/weights_checker`. Its errors are
answered with 400, while an error in most other routes ends the server.
"""

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from engines.transfer.worker_calls import call_of

TARGET = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"
_SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """Register the hook. SGLang calls this in each process at its start; only workers have a scheduler."""
    if multiprocessing.parent_process() is None or _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, check_weights, HookType.AROUND)


def check_weights(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Answer a call of ours; pass any other request on to SGLang's method of `manager`."""
    call = call_of(request.action)
    if call is None:
        return original(manager, request)
    from engines.inside_sglang.worker import answer

    return answer(manager, *call)
