"""Finds the draft of an SGLang worker, and the reason why updates leave its own weights."""

from typing import Any

from engines.inside_sglang.obstacles import obstacle_in_model
from engines.loading.draft import Draft, own_checkpoint


def draft_of(manager: Any) -> Draft | None:
    """Return the draft of this worker; None in a server that does not decode speculatively."""
    if manager.draft_worker is None:
        return None
    target = manager.tp_worker.model_runner
    settings = target.server_args
    method = str(settings.speculative_algorithm).lower()
    runners = draft_runners(manager)
    if not runners:
        return Draft(method)
    draft, *others = (runner.model for runner in runners)
    return Draft(method, draft, target.model, "it has several models" if others else _obstacle(settings, draft))


def draft_runners(manager: Any) -> list[Any]:
    """Return SGLang's runners of the draft's models in this worker; none where it has no model, and before SGLang
    0.5.23, which does not tell them."""
    told = getattr(manager.draft_worker, "weight_update_runners", list)
    return [runner for _, runner in told()]


def _obstacle(settings: Any, draft: Any) -> str:
    """Return why an update has nothing for the draft, or cannot load it; "" where it may."""
    return own_checkpoint(settings.speculative_draft_model_path, settings.model_path) or obstacle_in_model(draft)
