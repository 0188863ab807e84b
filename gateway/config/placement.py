"""The fit of a configuration's engines to the GPUs and CPUs of a cluster. Pure: imports no Ray.

A replica is one Ray actor that reserves all GPUs of its engine, so they are on one node by construction, and Ray gives
the actor a CUDA_VISIBLE_DEVICES of exactly those, which its engine process inherits. A placement group would add
nothing: one bundle on one node is what a single actor is, and the engine's workers are no actors that could take the
bundles of a larger one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.process.launch import gpus_to_reserve
from engines.types import EngineKind

Groups = Mapping[str, EngineConfig]
Nodes = Sequence[tuple[str, float]]
"""The address of each node, and what it has of a resource."""
Resource = Literal["GPU", "CPU"]

_REMEDY = "or, where nodes still join the cluster, set serve.nodes_may_join to true and the replicas wait for them"


def cpus_to_reserve(config: EngineConfig) -> float:
    """CPUs of one replica. An external server computes elsewhere."""
    return 0.0 if config.kind is EngineKind.EXTERNAL else config.num_cpus


_RESERVED: Mapping[Resource, tuple[Callable[[EngineConfig], float], str, str]] = {
    "GPU": (gpus_to_reserve, "tensor x pipeline x data parallel size", "tensor_parallel_size"),
    "CPU": (cpus_to_reserve, "num_cpus", "num_cpus"),
}
"""What a replica reserves, the words for it, and the key to lower."""


def needed(groups: Groups, resource: Resource = "GPU") -> float:
    """What all replicas of all groups take together."""
    return sum(_RESERVED[resource][0](group) * group.num_replicas for group in groups.values())


def check_placement(groups: Groups, nodes: Nodes, resource: Resource = "GPU") -> None:
    """Raise `ConfigError` for replicas that do not fit these nodes even when nothing of the resource is taken."""
    reserved, words, key = _RESERVED[resource]
    largest, total = max((amount for _, amount in nodes), default=0), sum(amount for _, amount in nodes)
    listed = ", ".join(f"{address}: {amount:g}" for address, amount in nodes if amount) or "no node has any"
    for name, group in groups.items():
        if reserved(group) > largest:
            section = "engine" if name == "engine" else f"engines.{name}"
            raise ConfigError(
                f"{section}: a replica takes {reserved(group):g} {resource}s ({words}) and the largest node has "
                f"{largest:g} ({listed}); a replica cannot span nodes. Lower {section}.{key}, {_REMEDY}"
            )
    if needed(groups, resource) > total:
        raise ConfigError(
            f"{_demand(groups, resource)} and the cluster has {total:g} ({listed}). Lower num_replicas, {_REMEDY}"
        )


def lacking(groups: Groups, total: float, free: float) -> str:
    """Return the reason why replicas find no GPUs now on a large enough cluster; "" where they do."""
    if needed(groups) <= free:
        return ""
    return (
        f"{_demand(groups, 'GPU')}; of the cluster's {total:g} are {free:g} free and {total - free:g} taken by others. "
        f"Free them (`ray status` and `serve status` list their users), lower num_replicas, {_REMEDY}"
    )


def _demand(groups: Groups, resource: Resource) -> str:
    shares = {name: (group.num_replicas, _RESERVED[resource][0](group)) for name, group in groups.items()}
    listed = ", ".join(f"{name}: {count} x {share:g}" for name, (count, share) in shares.items() if share)
    return f"the replicas take {needed(groups, resource):g} {resource}s ({listed})"
