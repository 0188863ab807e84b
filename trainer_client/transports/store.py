"""The store transport: the trainer writes a version to a shared folder and announces its name.

For trainers on the same node (in memory: /dev/shm) or file system, with any engine. Without a process group, so a death
blocks no other process.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import StoreFailed
from engines.store.changed_elements import Array, ChangedElements
from engines.store.draft import ChangedTensor, Draft, RawTensor, claim_draft
from engines.store.manifest import Manifest, StoredTensor, digest_of
from engines.store.shard_writer import ShardWriter
from engines.transfer.tensor_bytes import raw_tensor
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.served import PushOptions
from trainer_client.transports.ranks import Part

_STEPS_IN_ONE_CALL = 4
"""Checksum, wait for rollouts in flight, load, canary: the gateway bounds each one."""
_WORTH = 0.25
"""Largest share of a tensor's bytes to write as changed elements: joining them has a cost too."""


class StoreTransport:
    """Sends weights through the gateway's weight store; `folder` is its path on this machine (default: the gateway's).

    With `delta` the last push is kept in host memory, and what the served version has is not written: unchanged tensors
    are left out, and a tensor with few changes is written as changed elements.
    """

    def __init__(
        self,
        client: BlockingRolloutClient,
        timeout_s: float,
        folder: str | os.PathLike[str] | None = None,
        *,
        delta: bool = False,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._folder = Path(folder) if folder is not None else None
        self._last_sent = LastSent() if delta else None

    def push(self, parts: Iterable[Part], options: PushOptions) -> int:
        """Write a draft and let the replicas load it. Raise `StoreFailed` if the store is full or not found here."""
        store = self._client.weight_store()
        folder = self._folder or Path(store["folder"])
        if not folder.is_dir():
            raise StoreFailed(
                f"the gateway's weight store {store['folder']} is not found at {folder}: share weights.store with this "
                "machine, and give its path here as WeightSender(folder=...)"
            )
        path, owner = claim_draft(folder)
        try:
            self._write(path, store["model"], _base(folder, store) if self._last_sent is not None else None, parts)
            rolls = store["rolling"] if options.rolling is None else options.rolling
            timeout_s = self._timeout_s * _STEPS_IN_ONE_CALL * (max(1, store["replicas"]) if rolls else 1)
            return self._client.load_weights(path.name, options, timeout_s)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(path, ignore_errors=True)  # gone already if it became a version
            os.close(owner)

    def close(self, reason: str = "") -> None:
        """Forget the last push: the next one is complete."""
        if self._last_sent is not None:
            self._last_sent.forget()

    def _write(self, path: Path, model: str, base: Manifest | None, parts: Iterable[Part]) -> None:
        draft = Draft(path, model, base=base.version if base else None)
        written = 0
        with ShardWriter(draft) as writer:
            for name, tensor in (named for part in parts for named in part.tensors):
                whole = raw_tensor(name, tensor)
                changes = self._last_sent.changes(whole, base) if self._last_sent is not None else whole
                if changes is not None:
                    writer.add(changes)
                    written += 1
            if not written:
                writer.add(whole)  # a version needs a tensor
            writer.finish()
        draft.finish()


def _base(folder: Path, store: Mapping[str, Any]) -> Manifest | None:
    """Return the base version for changes; None if there is none."""
    version = store.get("base")
    if version is None:
        return None
    try:
        return Manifest.read(folder / f"v{version}")
    except StoreFailed:
        return None  # just removed


@dataclass(slots=True)
class _Sent:
    content: Array
    digest: str


class LastSent:
    """The last sent bytes of each tensor, in host memory, to find changed elements.

    The alternative, to read the version before from the store, would move a whole version over the network to a trainer
    on another machine in every step.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, _Sent] = {}

    def changes(self, tensor: RawTensor, base: Manifest | None) -> RawTensor | ChangedTensor | None:
        """Return what of the tensor a draft on `base` needs: nothing, its changed elements, or the whole tensor."""
        content, digest = np.frombuffer(tensor.bytes, np.uint8), digest_of(tensor.bytes)
        whole, served = replace(tensor, digest=digest), base.tensors.get(tensor.name) if base else None
        sent = self._tensors.get(tensor.name)
        if sent is None or sent.content.size != content.size:
            self._tensors[tensor.name] = _Sent(content.copy(), digest)
            return whole
        before, sent.digest = sent.digest, digest
        elements = ChangedElements.between(sent.content, content, max(1, tensor.width()))
        elements.apply_to(sent.content)
        if not _is(served, tensor, before):
            return whole
        if digest == before:
            return None
        if elements.num_bytes >= _WORTH * tensor.num_bytes:
            return whole
        return ChangedTensor(tensor.name, tensor.dtype, tensor.shape, digest, before, elements)

    def forget(self) -> None:
        """Forget all tensors: the next send is complete."""
        self._tensors.clear()


def _is(served: StoredTensor | None, tensor: RawTensor, digest: str) -> bool:
    """True if the served tensor has the bytes with this digest, in the form of `tensor`."""
    return served is not None and (served.digest, served.dtype, served.shape) == (
        digest,
        tensor.dtype,
        list(tensor.shape),
    )
