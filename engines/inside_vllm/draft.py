"""Finds the draft of a vLLM worker, and the reason why updates leave its own weights."""

from typing import Any

from engines.inside_vllm.in_place import obstacle
from engines.loading.draft import Draft, own_checkpoint


def draft_of(worker: Any) -> Draft | None:
    """Return the draft of this worker; None in an engine that does not decode speculatively."""
    config = worker.vllm_config.speculative_config
    if config is None:
        return None
    model = worker.get_draft_model()
    if model is None:
        return Draft(config.method)
    return Draft(config.method, model, worker.get_model(), _obstacle(worker, config.draft_model_config, model))


def _obstacle(worker: Any, draft: Any, model: Any) -> str:
    """Return why an update has nothing for the draft, or cannot load it; "" where it may."""
    return own_checkpoint(draft.model, worker.vllm_config.model_config.model) or obstacle(worker, model)
