"""The served weights, as a trainer sees them before a push."""

import msgspec

from engines.types import TensorMeta
from trainer_client.http import Json


class ServedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's weights, as GET /v1/weights tells them."""

    model: str
    tensors: tuple[TensorMeta, ...] | None
    """Checkpoint names, with the engines' dtypes and shapes; None if no replica could read its checkpoint."""
    replicas: tuple[Json, ...] = ()
    """Each has its `replica_id`, and the UUIDs of its `gpus`."""
    config: str = ""
    """Content of the checkpoint's config.json."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of each tensor that the checkpoint stores more than once."""
