"""The served weights, as a trainer sees them before a push, and what a push asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.types import InFlight, TensorMeta
from trainer_client.http import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The arguments of `WeightSender.push` beside the tensors; None leaves the choice to the gateway."""

    version: int | None = None
    canary_logprobs: Sequence[float] | None = None
    in_flight: InFlight | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The policy's weights."""

    model: str
    version: int
    tensors: tuple[TensorMeta, ...] | None
    """Checkpoint names, with the engines' dtypes and shapes; None if no replica could read its checkpoint."""
    gpus: dict[str, str]
    """Replica ids by GPU UUID."""
    config: str = ""
    """Content of the checkpoint's config.json."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of each tensor that the checkpoint stores more than once."""

    @classmethod
    def read(cls, reply: Json) -> "ServedWeights":
        """Read an answer of GET /v1/weights."""
        listed = reply["tensors"]
        return cls(
            model=reply["model"],
            version=reply["weight_version"],
            tensors=None if listed is None else tuple(_tensor(one) for one in listed),
            gpus={gpu: replica["replica_id"] for replica in reply["replicas"] for gpu in replica["gpus"]},
            config=reply.get("config", ""),
            tied=tuple(map(tuple, reply.get("tied", ()))),
        )


def _tensor(reply: Json) -> TensorMeta:
    return TensorMeta(name=reply["name"], dtype=reply["dtype"], shape=tuple(reply["shape"]))
