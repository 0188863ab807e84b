"""What the fleet serves, as a trainer sees it before it sends."""

from dataclasses import asdict, dataclass
from typing import Any

from engines.types import TensorMeta

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The policy. `tensors` are under checkpoint names, in the dtypes and shapes that engines hold them in; None where
    no replica could read its checkpoint. `update` names the update that made the version, where the gateway has seen
    one. `gpus` are the replicas' ids by the UUIDs of their GPUs."""

    model: str
    version: int
    update: str | None
    tensors: tuple[TensorMeta, ...] | None
    gpus: dict[str, str]

    @classmethod
    def read(cls, told: Json) -> "ServedWeights":
        """From what GET /v1/weights answers, or `json` has made."""
        listed = told["tensors"]
        return cls(
            model=told["model"],
            version=told["weight_version"],
            update=told["update"],
            tensors=None if listed is None else tuple(_tensor(one) for one in listed),
            gpus={gpu: replica["replica_id"] for replica in told["replicas"] for gpu in replica["gpus"]},
        )

    def json(self) -> Json:
        """For another rank of the trainer."""
        return {
            "model": self.model,
            "weight_version": self.version,
            "update": self.update,
            "tensors": self.tensors and [asdict(tensor) for tensor in self.tensors],
            "replicas": [{"replica_id": replica_id, "gpus": [gpu]} for gpu, replica_id in self.gpus.items()],
        }


def _tensor(told: Json) -> TensorMeta:
    return TensorMeta(name=told["name"], dtype=told["dtype"], shape=tuple(told["shape"]))
