"""The difference between a deployed application and a configuration, and the restarts that it means.

Serve restarts every replica of an application whose arguments changed, the gateway included. Numbers of replicas
travel beside the arguments, so that a change of them alone restarts nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.config.schema import Config
from gateway.config.serve_document import KEY_LISTS
from gateway.config.sources import leaves

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
    before, config = (Config.model_validate(application.get("args") or {}) for application in (deployed, document))
    old, new = _revealed(before), _revealed(config)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    counts = {group: engine.num_replicas for group, engine in before.groups.items()} | _scaled_to(deployed)
    wanted = {group: engine.num_replicas for group, engine in config.groups.items()}
    return Changes(
        keys=tuple(key for key in keys if not key.endswith(".num_replicas")),
        replicas={
            group: (counts[group], number)
            for group, number in wanted.items()
            if group in counts and counts[group] != number
        },
    )


def scaled(deployed: Mapping[str, Any], group: str, num_replicas: int) -> dict[str, Any]:
    """Return the deployed document with another number of replicas. Other overrides stay."""
    overrides = {override["name"]: dict(override) for override in deployed.get("deployments") or ()}
    overrides[group] = {**overrides.get(group, {"name": group}), "num_replicas": num_replicas}
    gateways = overrides.get(GATEWAY, {"name": GATEWAY})
    known = (gateways.get("user_config") or {}).get("num_replicas") or {}
    overrides[GATEWAY] = {**gateways, "user_config": {"num_replicas": {**known, group: num_replicas}}}
    return {**deployed, "deployments": list(overrides.values())}


def has_running_engine(application: Mapping[str, Any]) -> bool:
    """Return True where an engine replica of the application runs."""
    engines = (found for name, found in application["deployments"].items() if name not in (GATEWAY, CONTROL))
    return any(replica["state"] == "RUNNING" for engine in engines for replica in engine["replicas"])


def _scaled_to(deployed: Mapping[str, Any]) -> dict[str, int]:
    numbers = {override["name"]: override.get("num_replicas") for override in deployed.get("deployments") or ()}
    return {group: number for group, number in numbers.items() if number is not None}


def _revealed(config: Config) -> dict[str, Any]:
    """Return values by dotted key, with the references to keys, which other dumps hide. They are no secrets."""
    tree = config.model_dump(mode="json")
    for name in KEY_LISTS:
        tree["gateway"][name] = [item.get_secret_value() for item in getattr(config.gateway, name)]
    return {".".join(map(str, key)): value for key, value in leaves(tree)}
