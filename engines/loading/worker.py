"""The part of our code in an engine's workers that is the same for vLLM and SGLang. A call reaches all workers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engines.batches import batches
from engines.checkpoint.names import CheckpointNames, announced_as, checkpoint_names
from engines.engine import ReceiptCopy
from engines.errors import WeightUpdateFailed
from engines.loading.planned_load import PlannedLoad, form_of
from engines.loading.snapshot_reader import pin_memory, read_tensors
from engines.loading.stage import FolderStage, ReceivedStage, Stage
from engines.transfer.tee import Scribe, WeightTee, prepare, room_on
from engines.types import TensorMeta

_BATCH_BYTES = 512 << 20
"""Batch of a folder that is loaded in place: large enough that loaders run seldom, small enough for a full GPU."""


class UpdatedWorker:
    """The updates of one worker. vLLM mixes this into its worker class: there is no constructor, and names here must
    differ from that class's own."""

    stage: Stage | None = None
    tee: WeightTee | None = None
    scribe: Scribe | None = None
    """Of the last copy."""

    @property
    def target(self) -> PlannedLoad:
        """The loads of this worker's model."""
        raise NotImplementedError

    def kv_memory(self) -> object:
        """Return the tensors of the KV cache, in lists and tuples of any depth."""
        raise NotImplementedError

    def load_version(self, folder: Path, stage: FolderStage | None) -> bool | None:
        """Load all weights from a folder, or from the engine's own checkpoint where there is no such folder. Return
        False where the engine's own route has to."""
        raise NotImplementedError

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context for all changes of the weights here: no step reads them any more, and after it all copies
        have ended."""
        self.target.begin()
        synchronize(self.target.device)
        yield
        synchronize(self.target.device)

    names = CheckpointNames()

    def plan_updates(
        self, tensors: Sequence[dict[str, Any]] = (), config: str = "", tied: Sequence[Sequence[str]] = ()
    ) -> dict[str, str]:
        """Prepare for updates of the checkpoint's tensors, with the arguments of `CheckpointNames`: the first update
        takes no longer than the next. What takes seconds is made now: at the start no rollout waits for it.

        Return why updates are left to the engine's own reload.
        """
        self.names = checkpoint_names([one["name"] for one in tensors], config, tied)
        self.names.prepare()
        prepare(self.target.device)
        if self.target.device.type == "cuda":
            pin_memory()
        self.target.begin()
        self.target.plan([form_of(TensorMeta(**{**one, "shape": tuple(one["shape"])})) for one in tensors])
        return {"obstacle": self.target.obstacle}

    def announced_as(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """Return the announcement under the checkpoint's names, or the reason why it is refused."""
        return announced_as(self.names, update_info)

    def room_to_stage(self, num_bytes: int) -> dict[str, bool]:
        """Report whether tensors of so many bytes fit beside the weights, without those that an update has left."""
        self.drop_receipt()
        return {"room": num_bytes <= room_on(self.target.device)}

    def begin_receipt(self, model: Any, copy: dict[str, Any], *, is_first: bool) -> None:
        """Digest tensors from now on that the `load_weights` of `model` gets, after `drop_receipt`. With `copy`, the
        fields of `ReceiptCopy`, the first worker also copies them."""
        self.target.begin()
        scribe = Scribe.after(self.scribe, ReceiptCopy(**copy)) if copy and is_first else None
        self.scribe = scribe or self.scribe
        self.tee = WeightTee(model, scribe, self.target.load, self.names)

    def begin_stage(
        self, update_info: dict[str, Any], receive: Callable[[dict[str, Any]], object], leave: Callable[[], None]
    ) -> None:
        """Begin to receive the announced tensors beside the weights, after `open_receipt`. The engine goes on."""
        if self.tee is None:
            raise WeightUpdateFailed("there is no open receipt")
        if not isinstance(self.stage, ReceivedStage):
            self.stage = ReceivedStage(self.target.device, leave)
            self.tee.load_by(self.stage.add)
        self.stage.receive(update_info, receive)

    def staged(self) -> dict[str, bool]:
        """Report whether the announced tensors are here. Raises the error of their receiver."""
        return {"ready": self.stage is not None and self.stage.is_ready}

    def load_staged(self) -> None:
        """Load the staged tensors into the weights, inside an update."""
        stage, self.stage = self.stage, None
        if stage is None or not stage.is_ready:
            raise WeightUpdateFailed("load_staged without staged tensors")
        with self.loading():
            self.target.load(stage.take())

    def wipe_kv(self) -> None:
        """Overwrite the KV of all requests with zeros. No request may run."""
        synchronize(self.target.device)  # a step of SGLang may still write some
        with torch.inference_mode():
            for tensor in tensors_of(self.kv_memory()):
                tensor.zero_()
        synchronize(self.target.device)

    def close_receipt(self) -> dict[str, str]:
        """Return the digest of each received tensor. The copy is finished by `keep_receipt`."""
        tee, self.tee = self.tee, None
        return tee.close() if tee is not None else {}

    def keep_receipt(self) -> None:
        """Finish the draft in the background, or note there why it failed: the update is committed."""
        if self.scribe is not None:
            self.scribe.keep()

    def drop_receipt(self) -> None:
        """Stop digesting and copying; the draft is discarded, and so is what waits in memory for a load."""
        stage, self.stage = self.stage, None
        tee, self.tee = self.tee, None
        if stage is not None:
            stage.drop()
        if tee is not None:
            tee.remove()
        if self.scribe is not None:
            self.scribe.drop()

    def prepare_snapshot(self, path: str, version: int = 0) -> dict[str, bool]:
        """Begin to stage a folder, with the arguments of `load_snapshot`. Report whether it has ended."""
        folder, device = Path(path), self.target.device
        if device.type == "cpu" or not folder.is_dir():
            return {"ready": True}
        if not (isinstance(self.stage, FolderStage) and self.stage.is_of(folder)):
            if self.stage is not None:
                self.stage.drop()  # its memory is room for the next
            self.stage = FolderStage(folder, device)
        try:
            is_ready = self.stage.is_ready
        except Exception:
            self.stage = None
            raise
        return {"ready": is_ready}

    def load_snapshot(self, path: str, version: int = 0) -> bool | None:
        """Load all weights from a checkpoint folder, also after an update that broke off.

        Version 0 is read from the engine's own checkpoint where this machine lacks the folder. Return False where the
        engine's own route has to load them.
        """
        folder = Path(path)
        if version and not folder.is_dir():
            raise FileNotFoundError(
                f"this machine has no folder {path}: have weights.store name a folder that all machines share"
            )
        stage = self.stage if isinstance(self.stage, FolderStage) and self.stage.holds(folder) else None
        if stage is not None:
            self.stage = None  # not dropped: it is loaded
        self.drop_receipt()
        return self.load_version(folder, stage)

    def load_folder(self, folder: Path, stage: FolderStage | None) -> None:
        """Load all weights in place from a folder, which may be staged already."""
        with self.loading():
            if stage is not None:
                self.target.load(stage.take())
            else:
                tensors = read_tensors(folder, self.target.device)
                for batch in batches(tensors, lambda named: named[1].nbytes, _BATCH_BYTES):
                    self.target.load(batch)


def tensors_of(held: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists and tuples of any depth."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for part in held:
            yield from tensors_of(part)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
