"""The difference between a deployed application and a configuration, and the restarts that it means.

Serve restarts every replica of an application whose arguments changed, the gateway included. Numbers of replicas
travel beside the arguments, so that a change of them alone restarts nothing. So do changes of a group that concern its
engines alone: they travel in a variable of the group's replicas, and Serve restarts these one after the other.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.config import REPLACED_BY, EngineConfig
from engines.types import EngineKind
from gateway.config.schema import Config
from gateway.config.serve_document import config_of
from gateway.config.sources import dotted, leaves

GATEWAY = "gateway"
CONTROL = "control"
_ENGINES_OWN = frozenset(
    {
        "api_server_count", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "enable_prefix_caching",
        "enable_chunked_prefill", "load_format", "seed", "max_logprobs", "stream_interval", "disable_log_stats", "env",
        "profiling", "start_timeout_s", "sim",
    }
)  # fmt: skip
"""Keys of a group that neither the gateway nor Serve reads: the replicas report their effects."""


@dataclass(frozen=True, slots=True)
class Changes:
    """`keys` are changed keys other than numbers of replicas; `replicas` has the numbers before and after by group.
    `groups` restart alone; None where the gateway restarts too."""

    keys: tuple[str, ...]
    replicas: Mapping[str, tuple[int, int]]
    groups: tuple[str, ...] | None = ()

    def __str__(self) -> str:
        if not self.keys:
            counts = (f"{group}: {before} -> {after} replicas" for group, (before, after) in self.replicas.items())
            return f"{', '.join(counts)}; nothing restarts" if self.replicas else "nothing changes"
        changed = f"{', '.join(self.keys)} changed"
        if self.groups is not None:
            return (
                f"{changed}: replicas of {', '.join(self.groups)} restart one after the other; the gateway and its "
                "rollouts go on"
            )
        return (
            f"{changed}: engine replicas restart one after the other, and the gateway restarts, which ends the "
            "rollouts in flight"
        )


def changes(deployed: Mapping[str, Any], document: Mapping[str, Any]) -> Changes:
    """Compare Serve's document of a deployed application with the one to deploy."""
    before, config = _running(deployed), config_of(document)
    old, new = (dict(leaves(one.model_dump(mode="json"))) for one in (before, config))
    changed = sorted(dotted(key) for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    keys = tuple(key for key in changed if not key.endswith(".num_replicas"))
    counts = {group: engine.num_replicas for group, engine in before.groups.items()} | _scaled_to(deployed)
    wanted = {group: engine.num_replicas for group, engine in config.groups.items()}
    return Changes(
        keys=keys,
        replicas={
            group: (counts[group], number)
            for group, number in wanted.items()
            if group in counts and counts[group] != number
        },
        groups=_alone(before, config, keys),
    )


def replaced(
    deployed: Mapping[str, Any], group: str, config: EngineConfig, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the deployed document with another configuration of a group. `options` are its Ray options as they are."""
    variables = {REPLACED_BY: json.dumps(config.model_dump(mode="json", exclude_defaults=True), sort_keys=True)}
    env = {**(options.get("runtime_env") or {}), "env_vars": variables}
    kept = {name: value for name, value in options.items() if value is not None}
    return _overridden(deployed, group, ray_actor_options={**kept, "runtime_env": env})


def scaled(deployed: Mapping[str, Any], group: str, num_replicas: int) -> dict[str, Any]:
    """Return the deployed document with another number of replicas. Other overrides stay."""
    known = (_overrides(deployed).get(GATEWAY, {}).get("user_config") or {}).get("num_replicas") or {}
    sized = _overridden(deployed, group, num_replicas=num_replicas)
    return _overridden(sized, GATEWAY, user_config={"num_replicas": {**known, group: num_replicas}})


def has_running_engine(application: Mapping[str, Any]) -> bool:
    """Return True where an engine replica of the application runs, or may: after a change that it cannot build Serve
    lists nothing, and the fleet before it goes on."""
    found = application["deployments"]
    engines = (deployment for name, deployment in found.items() if name not in (GATEWAY, CONTROL))
    return not found or any(replica["state"] == "RUNNING" for engine in engines for replica in engine["replicas"])


def _overridden(deployed: Mapping[str, Any], name: str, **settings: Any) -> dict[str, Any]:
    overrides = _overrides(deployed)
    overrides[name] = {"name": name, **overrides.get(name, {}), **settings}
    return {**deployed, "deployments": list(overrides.values())}


def _overrides(deployed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {override["name"]: dict(override) for override in deployed.get("deployments") or ()}


def _scaled_to(deployed: Mapping[str, Any]) -> dict[str, int]:
    numbers = {name: override.get("num_replicas") for name, override in _overrides(deployed).items()}
    return {group: number for group, number in numbers.items() if number is not None}


def _running(deployed: Mapping[str, Any]) -> Config:
    """Return the configuration that runs: the arguments, with the groups that were replaced since."""
    config = config_of(deployed)
    for name, override in _overrides(deployed).items():
        variables = ((override.get("ray_actor_options") or {}).get("runtime_env") or {}).get("env_vars") or {}
        if text := variables.get(REPLACED_BY):
            group = EngineConfig.model_validate_json(text)
            changed = {"engines": {**config.engines, name: group}} if config.engines else {"engine": group}
            config = config.model_copy(update=changed)
    return config


def _alone(before: Config, config: Config, keys: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the groups that the changed keys restart alone; None where the gateway restarts too."""
    if before.groups.keys() != config.groups.keys():
        return None
    if any(group.kind is EngineKind.EXTERNAL for group in config.groups.values()):
        return None  # a replaced group would need its key, which no document holds
    prefixes = {f"engines.{name}.": name for name in config.engines} or {"engine.": next(iter(config.groups))}
    found = []
    for key in keys:
        if config.engines and key.startswith("engine."):
            continue  # the groups have taken it over
        own = [name for prefix, name in prefixes.items() if _is_engines_own(key, prefix)]
        if not own:
            return None
        found += own
    return tuple(dict.fromkeys(found))


def _is_engines_own(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key.removeprefix(prefix).partition(".")[0] in _ENGINES_OWN
