"""What the fleet serves, as a trainer sees it before it sends."""

from dataclasses import dataclass
from typing import Any

from engines.types import TensorMeta

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The policy. `tensors` are under checkpoint names, in the dtypes and shapes that engines hold them in; None where
    no replica could read its checkpoint. `gpus` are the replicas' ids by the UUIDs of their GPUs."""

    model: str
    version: int
    tensors: tuple[TensorMeta, ...] | None
    gpus: dict[str, str]


def read_served(reply: Json) -> ServedWeights:
    """What GET /v1/weights answered."""
    return ServedWeights(
        model=reply["model"],
        version=reply["weight_version"],
        tensors=read_tensors(reply["tensors"]),
        gpus={gpu: replica["replica_id"] for replica in reply["replicas"] for gpu in replica["gpus"]},
    )


def read_tensors(listed: list[Json] | None) -> tuple[TensorMeta, ...] | None:
    """None where they are not known."""
    if listed is None:
        return None
    return tuple(TensorMeta(name=one["name"], dtype=one["dtype"], shape=tuple(one["shape"])) for one in listed)
