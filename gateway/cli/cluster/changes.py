"""The difference between a deployed application and a configuration, and the restarts that it means.

Serve restarts every replica of an application whose arguments changed, the gateway included. Numbers of replicas
travel beside the arguments, so that a change of them alone restarts nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.config.serve_document import config_of
from gateway.config.sources import dotted, leaves

GATEWAY = "gateway"
CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Changes:
    """`keys` are changed keys other than numbers of replicas; `replicas` has the numbers before and after by group."""

    keys: tuple[str, ...]
    replicas: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        if not self.keys:
            counts = (f"{group}: {before} -> {after} replicas" for group, (before, after) in self.replicas.items())
            return f"{', '.join(counts)}; nothing restarts" if self.replicas else "nothing changes"
        return (
            f"{', '.join(self.keys)} changed: engine replicas restart one after the other, and the gateway restarts, "
            "which ends the rollouts in flight"
        )


def changes(deployed: Mapping[str, Any], document: Mapping[str, Any]) -> Changes:
    """Compare Serve's document of a deployed application with the one to deploy."""
    before, config = config_of(deployed), config_of(document)
    old, new = (dict(leaves(one.model_dump(mode="json"))) for one in (before, config))
    changed = sorted(dotted(key) for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    # Serve takes no number of replicas from outside where it chooses the number itself.
    by_load = {f"{'engines.' * bool(config.engines)}{name}" for name, one in config.groups.items() if one.max_replicas}
    keys = tuple(key for key in changed if key.removesuffix(".num_replicas") in {key, *by_load})
    counts = {group: engine.num_replicas for group, engine in before.groups.items()} | _scaled_to(deployed)
    wanted = {group: engine.num_replicas for group, engine in config.groups.items() if not engine.max_replicas}
    return Changes(
        keys=keys,
        replicas={
            group: (counts[group], number)
            for group, number in wanted.items()
            if group in counts and counts[group] != number
        },
    )


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
