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


def push(
    client: BlockingRolloutClient,
    parts: Iterable[Part],
    terms: Json,
    timeout_s: float,
    folder: str | os.PathLike[str] | None,
) -> int:
    """Write a draft and let the replicas load it; return its version once it is served. `folder` is the store's path
    here (default: the gateway's). Raise `StoreFailed` if the store is full or not found here."""
    store = client.call("GET", "/v1/weight_store")
    here = Path(store["folder"] if folder is None else folder)
    if not here.is_dir():
        raise StoreFailed(
            f"the gateway's weight store {store['folder']} is not found at {here}: share weights.store with this "
            "machine, and give its path here as WeightSender(folder=...)"
        )
    path, owner = claim_draft(here)
    try:
        _write(Draft(path, store["model"]), parts)
        body = {"transport": "store", "snapshot": path.name, **terms}
        return int(client.call("POST", "/v1/weight_updates", body, timeout_s * _STEPS_IN_ONE_CALL)["weight_version"])
    finally:
        shutil.rmtree(path, ignore_errors=True)  # gone already if it became a version
        os.close(owner)


def _write(draft: Draft, parts: Iterable[Part]) -> None:
    with ShardWriter(draft) as writer:
        for part in parts:
            for name, tensor in part.tensors:
                writer.add(raw_tensor(name, tensor))
        writer.finish()
    draft.finish()
