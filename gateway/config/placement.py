"""The fit of a configuration's engines to the GPUs and CPUs of a cluster. Pure: imports no Ray.

A replica is one Ray actor that reserves all GPUs of its engine, so they are on one node by construction, and Ray gives
the actor a CUDA_VISIBLE_DEVICES of exactly those, which its engine process inherits. A placement group would add
nothing: one bundle on one node is what a single actor is, and the engine's workers are no actors that could take the
bundles of a larger one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.process.launch import gpus_to_reserve
from engines.types import EngineKind

_REMEDY = "or, where nodes still join the cluster, set serve.nodes_may_join to true and the replicas wait for them"


@dataclass(frozen=True, slots=True)
class ClusterGpus:
    """GPUs of each node, with its address, and how many of all are free."""

    nodes: Sequence[tuple[str, float]]
    free: float

    @property
    def total(self) -> float:
        return sum(gpus for _, gpus in self.nodes)


def gpus_needed(groups: Mapping[str, EngineConfig]) -> float:
    """GPUs of all replicas of all groups together."""
    return sum(gpus_to_reserve(group) * group.num_replicas for group in groups.values())


def check_placement(groups: Mapping[str, EngineConfig], cluster: ClusterGpus) -> None:
    """Raise `ConfigError` for replicas that do not fit these nodes even when all GPUs are free."""
    largest = max((gpus for _, gpus in cluster.nodes), default=0)
    for name, group in groups.items():
        wanted = gpus_to_reserve(group)
        if wanted > largest:
            section = _section(name)
            raise ConfigError(
                f"{section}: a replica takes {wanted:g} GPUs (tensor x pipeline x data parallel size) and the largest "
                f"node has {largest:g} ({_listed(cluster.nodes)}); a replica cannot span nodes. Lower "
                f"{section}.tensor_parallel_size, {_REMEDY}"
            )
    needed = gpus_needed(groups)
    if needed > cluster.total:
        raise ConfigError(
            f"the replicas take {needed:g} GPUs ({_shares(groups, gpus_to_reserve)}) and the cluster has "
            f"{cluster.total:g} ({_listed(cluster.nodes)}). Lower num_replicas, {_REMEDY}"
        )


def cpus_to_reserve(config: EngineConfig) -> float:
    """CPUs of one replica. An external server computes elsewhere."""
    return 0.0 if config.kind is EngineKind.EXTERNAL else config.num_cpus


def check_cpus(groups: Mapping[str, EngineConfig], nodes: Sequence[float]) -> None:
    """Raise `ConfigError` for replicas that do not fit the CPUs of these nodes even when all are free."""
    largest = max(nodes, default=0)
    for name, group in groups.items():
        if (wanted := cpus_to_reserve(group)) > largest:
            raise ConfigError(
                f"{_section(name)}.num_cpus = {wanted:g}: the largest node has {largest:g}. Lower it, {_REMEDY}"
            )
    needed = sum(cpus_to_reserve(group) * group.num_replicas for group in groups.values())
    if needed > sum(nodes):
        raise ConfigError(
            f"the replicas take {needed:g} CPUs ({_shares(groups, cpus_to_reserve)}) and the cluster has "
            f"{sum(nodes):g}. Lower num_cpus or num_replicas, {_REMEDY}"
        )


def lacking(groups: Mapping[str, EngineConfig], cluster: ClusterGpus) -> str:
    """Return the reason why replicas cannot be placed now on a large enough cluster; "" where they can."""
    needed = gpus_needed(groups)
    if needed <= cluster.free:
        return ""
    return (
        f"the replicas take {needed:g} GPUs ({_shares(groups, gpus_to_reserve)}); of the cluster's {cluster.total:g} "
        f"are {cluster.free:g} free and {cluster.total - cluster.free:g} taken by others. Free them (`ray status` and "
        f"`serve status` list their users), lower num_replicas, {_REMEDY}"
    )


def _section(name: str) -> str:
    return "engine" if name == "engine" else f"engines.{name}"


def _shares(groups: Mapping[str, EngineConfig], reserved: Callable[[EngineConfig], float]) -> str:
    shares = {name: (group.num_replicas, reserved(group)) for name, group in groups.items()}
    return ", ".join(f"{name}: {count} x {share:g}" for name, (count, share) in shares.items() if share)


def _listed(nodes: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{address}: {gpus:g}" for address, gpus in nodes if gpus) or "no node has any"
