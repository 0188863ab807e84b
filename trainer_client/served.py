"""The served weights, as a trainer sees them before a push."""

from dataclasses import asdict, dataclass
from typing import Any

from engines.types import TensorMeta

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The policy's weights.

    tensors: checkpoint names, with the engines' dtypes and shapes; None if no replica could read its checkpoint.
    config: content of the checkpoint's config.json.
    tied: names of each tensor that the checkpoint stores more than once.
    update: id of the update that made the version, if any.
    gpus: replica ids by GPU UUID.
    """

    model: str
    version: int
    update: str | None
    tensors: tuple[TensorMeta, ...] | None
    gpus: dict[str, str]
    config: str = ""
    tied: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def read(cls, reply: Json) -> "ServedWeights":
        """Read an answer of GET /v1/weights, or a result of `json`."""
        listed = reply["tensors"]
        return cls(
            model=reply["model"],
            version=reply["weight_version"],
            update=reply["update"],
            tensors=None if listed is None else tuple(_tensor(one) for one in listed),
            gpus={gpu: replica["replica_id"] for replica in reply["replicas"] for gpu in replica["gpus"]},
            config=reply.get("config", ""),
            tied=tuple(map(tuple, reply.get("tied", ()))),
        )

    def json(self) -> Json:
        """Return the JSON form for another trainer rank."""
        return {
            "model": self.model,
            "weight_version": self.version,
            "update": self.update,
            "tensors": self.tensors and [asdict(tensor) for tensor in self.tensors],
            "config": self.config,
            "tied": self.tied,
            "replicas": [{"replica_id": replica_id, "gpus": [gpu]} for gpu, replica_id in self.gpus.items()],
        }


def _tensor(reply: Json) -> TensorMeta:
    return TensorMeta(name=reply["name"], dtype=reply["dtype"], shape=tuple(reply["shape"]))
