"""A version goes through the weight store: the trainer writes a folder that engines see too, and announces its name.

For trainers on the same node (memory: /dev/shm) or the same file system, whatever the engines are; no process group, so
nobody hangs when somebody dies.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from engines.errors import StoreFailed
from engines.gloo_transfer import NamedTensor
from engines.tensor_bytes import raw_tensor
from engines.weight_store import SHARD_BYTES, Draft, RawTensor, claim_draft
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.part import Part
from trainer_client.push_options import PushOptions

_STEPS_IN_ONE_CALL = 4
"""Checking the bytes, waiting for rollouts in flight, loading, and the canary: the gateway bounds each by itself."""


class StoreTransport:
    """`folder` is the gateway's weight store as this machine sees it; what the gateway calls it unless given."""

    def __init__(
        self, client: BlockingRolloutClient, timeout_s: float, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._folder = Path(folder) if folder is not None else None

    def push(self, parts: Iterable[Part], options: PushOptions) -> int:
        """Write a draft and have it loaded. Raises `StoreFailed` where the store has no room or is not here."""
        store = self._client.weight_store()
        folder = self._folder or Path(store["folder"])
        if not folder.is_dir():
            raise StoreFailed(
                f"the gateway's weight store {store['folder']} is not at {folder} here: share weights.store with this "
                "machine, and give its folder here as WeightSender(folder=...)"
            )
        path, owner = claim_draft(folder)
        try:
            draft = Draft(path, store["model"])
            for shard in _shards(tensor for part in parts for tensor in part.tensors):
                draft.add(shard)
            draft.finish()
            rolls = store["rolling"] if options.rolling is None else options.rolling
            timeout_s = self._timeout_s * _STEPS_IN_ONE_CALL * (max(1, store["replicas"]) if rolls else 1)
            return self._client.load_weights(path.name, options, timeout_s)
        finally:
            shutil.rmtree(path, ignore_errors=True)  # where it became a version it is not there any more
            os.close(owner)

    def close(self, reason: str = "") -> None:
        """Nothing is held between two pushes."""


def _shards(named_tensors: Iterable[NamedTensor]) -> Iterator[list[RawTensor]]:
    """Host copies of the tensors, as many as make a file."""
    shard: list[RawTensor] = []
    size = 0
    for name, tensor in named_tensors:
        shard.append(raw_tensor(name, tensor))
        size += shard[-1].num_bytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard
