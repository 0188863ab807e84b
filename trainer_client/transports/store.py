"""The store transport: the trainer writes a version to a shared folder and announces its name.

For trainers on the same node (in memory: /dev/shm) or file system, with any engine. Without a process group, so a death
blocks no other process.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from engines.errors import StoreFailed
from engines.store.draft import Draft, claim_draft
from engines.store.shard_writer import ShardWriter
from engines.transfer.tensor_bytes import raw_tensor
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.http import Json
from trainer_client.transports.tensors import Part

_STEPS_IN_ONE_CALL = 4
"""Checksum, wait for rollouts in flight, load, canary: the gateway bounds each one."""


class StoreTransport:
    """Sends weights through the gateway's weight store; `folder` is its path here (default: the gateway's)."""

    def __init__(
        self, client: BlockingRolloutClient, timeout_s: float, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._folder = Path(folder) if folder is not None else None

    def push(self, parts: Iterable[Part], terms: Json, canary: Json) -> int:
        """Write a draft and let the replicas load it. Raise `StoreFailed` if the store is full or not found here."""
        store = self._client.call("GET", "/v1/weight_store")
        folder = self._folder or Path(store["folder"])
        if not folder.is_dir():
            raise StoreFailed(
                f"the gateway's weight store {store['folder']} is not found at {folder}: share weights.store with this "
                "machine, and give its path here as WeightSender(folder=...)"
            )
        path, owner = claim_draft(folder)
        try:
            _write(Draft(path, store["model"]), parts)
            body = {"transport": "store", "snapshot": path.name, **terms, **canary}
            reply = self._client.call("POST", "/v1/weight_updates", body, self._timeout_s * _STEPS_IN_ONE_CALL)
            return int(reply["weight_version"])
        finally:
            shutil.rmtree(path, ignore_errors=True)  # gone already if it became a version
            os.close(owner)

    def close(self, reason: str = "") -> None:
        """Do nothing: each push is complete by itself."""


def _write(draft: Draft, parts: Iterable[Part]) -> None:
    with ShardWriter(draft) as writer:
        for name, tensor in (named for part in parts for named in part.tensors):
            writer.add(raw_tensor(name, tensor))
        writer.finish()
    draft.finish()
