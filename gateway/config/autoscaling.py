"""The number of replicas by load: what Serve gets, and the rule that its controller calls. Imports no Ray."""

from typing import Any

from engines.config import EngineConfig


def sizing(config: EngineConfig) -> dict[str, Any]:
    """Return the options of a group's deployment that say how many replicas it has."""
    if config.max_replicas is None:
        return {"num_replicas": config.num_replicas}
    bounds = {"min_replicas": config.num_replicas, "max_replicas": config.max_replicas}
    delays = {"upscale_delay_s": config.upscale_delay_s, "downscale_delay_s": config.downscale_delay_s}
    policy = {"policy_function": f"{__name__}:{replicas_wanted.__name__}"}
    return {"autoscaling_config": {**bounds, **delays, "policy": policy}}


def replicas_wanted(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas by Serve's context, and no state. Serve keeps it in its bounds and delays.

    Each replica tells Serve as `wanted` how many of them the gateway's samples would fill. Serve itself counts no
    requests, since none passes through it.
    """
    told = (context.aggregated_metrics or {}).get("wanted")
    return (max(told.values()) if told else context.target_num_replicas), {}
