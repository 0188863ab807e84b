"""The extension of vLLM's workers (`--worker-extension-cls`). A call of /collective_rpc reaches all workers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from engines.checkpoint import read_tensors as read_checkpoint
from engines.checkpoint import served_in
from engines.inside_vllm.base_layers import base_layers, loader_of
from engines.inside_vllm.gloo_receiver import rebuild_tied_head
from engines.inside_vllm.in_place import load_in_place, load_layerwise, obstacle
from engines.loading.planned_load import Load, PlannedLoad, form_of
from engines.loading.prefetch import Prefetch
from engines.loading.receipts import Receipts
from engines.loading.snapshot_reader import pin_buffers, read_tensors
from engines.loading.stage import Stage
from engines.store.peer_store import PeerStore, fetched
from engines.transfer.gloo import NamedTensor
from engines.transfer.packed_streams import keep_streams
from engines.transfer.packed_views import unpack_quickly
from engines.transfer.tee import prepare, room_on
from engines.types import TensorMeta

_BATCH_BYTES = 512 << 20
"""Batch of a folder that is loaded in place: large enough that loaders run seldom, small enough for a full GPU."""


class WeightWorker:
    """Mixed into vLLM's worker class, so that `self` is the worker. Names here must differ from the worker's own."""

    prefetch: Prefetch | None = None
    stage: Stage | None = None

    def room_to_stage(self, num_bytes: int) -> dict[str, bool]:
        """Report whether tensors of so many bytes fit beside the weights, without those that an update has left."""
        worker: Any = self
        self.drop_receipt()
        return {"room": num_bytes <= room_on(worker.device)}

    def open_receipt(
        self, draft: str = "", model: str = "", base: str = "", names: Sequence[str] = (), wait_s: float = 0.0
    ) -> None:
        """Digest received tensors from now on. With `draft`, the first worker also copies them into that folder."""
        worker: Any = self
        self.drop_receipt()
        _end_reload(worker)
        prepare(worker.device)
        if worker.device.type == "cuda":
            keep_streams()
            unpack_quickly()
            pin_buffers(worker.device)
        if self._begin_in_place() is not None:
            load_in_place(worker.weight_transfer_engine)
        is_first = worker.rank == 0 and worker.parallel_config.data_parallel_index == 0
        self.receipts.open(
            worker.weight_transfer_engine.model,
            self._load,
            draft=draft if is_first else "",
            checkpoint=model,
            base=base,
            names=names,
            wait_s=wait_s,
        )

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive the announced tensors beside the weights, after `open_receipt`. The engine goes on."""
        worker: Any = self
        if self.stage is None:
            stage = Stage(worker.weight_transfer_engine, worker.device)
            self.receipts.load_by(stage.add)
            self.stage = stage
        self.stage.receive(update_info)

    def staged(self) -> dict[str, bool]:
        """Report whether the announced tensors are here. Raises the error of their receiver."""
        return {"ready": self.stage is not None and self.stage.is_ready}

    def load_staged(self) -> None:
        """Load the staged tensors into the weights, inside an update."""
        worker: Any = self
        stage, self.stage = self.stage, None
        if stage is None or not stage.is_ready:
            raise RuntimeError("load_staged without staged tensors")
        with _loading(worker):
            stage.load_by(self._load)

    def close_receipt(self) -> dict[str, str]:
        """Return the digest of each received tensor. The copy is finished by `keep_receipt`."""
        return self.receipts.close()

    def keep_receipt(self) -> None:
        """Finish the draft in the background, or note there why it failed: the update is committed."""
        self.receipts.keep()

    def drop_receipt(self) -> None:
        """Stop digesting and copying; the draft is discarded, and so is what waits in memory for a load."""
        worker: Any = self
        load_layerwise(worker.weight_transfer_engine)
        self.prefetch = None
        stage, self.stage = self.stage, None
        if stage is not None:
            stage.drop()
        self.receipts.drop()

    def end_update(self) -> None:
        """Finish an open update, if any, whatever its weights are: vLLM refuses to finish twice."""
        worker: Any = self
        if worker._weight_update_active:
            worker.finish_weight_update()

    def fetches(self) -> dict[str, bool]:
        """Report that `load_snapshot` exists, for external servers. vLLM would return a bare True as text."""
        return {"fetches": True}

    def plan_updates(self) -> dict[str, str]:
        """Plan loads of the checkpoint's tensors, so that the first update takes no longer than the next.

        Return why updates need vLLM's own reload instead; "" where they are loaded in place.
        """
        worker: Any = self
        in_place = self._begin_in_place()
        if in_place is not None:
            in_place.plan(map(form_of, _expected(worker.vllm_config.model_config)))
        return {"obstacle": self.obstacle}

    def prepare_snapshot(
        self, path: str, version: int = 0, peer_url: str = "", peer_key: str = "", timeout_s: float = 0.0
    ) -> dict[str, bool]:
        """Begin to prefetch a folder, with the arguments of `load_snapshot`. `ready` is True once it has ended."""
        worker: Any = self
        folder = Path(path)
        fetch = partial(fetched, folder, PeerStore(peer_url, peer_key), version, timeout_s) if peer_url else None
        if fetch is None and worker.device.type == "cpu":
            return {"ready": True}
        if self.prefetch is None or not self.prefetch.is_of(folder):
            self.prefetch = None  # its memory is room for the next
            self.prefetch = Prefetch(folder, worker.device, fetch)
        try:
            return {"ready": self.prefetch.is_ready}
        except Exception:
            self.prefetch = None
            raise

    def load_snapshot(
        self, path: str, version: int = 0, peer_url: str = "", peer_key: str = "", timeout_s: float = 0.0
    ) -> None:
        """Load all weights from a checkpoint folder, also after an update that broke off.

        With `peer_url`, a folder that this machine lacks is fetched from there as version `version`. Version 0 is then
        read from vLLM's own checkpoint.
        """
        worker: Any = self
        if peer_url:
            fetched(Path(path), PeerStore(peer_url, peer_key), version, timeout_s)
        elif version and not Path(path).is_dir():
            raise FileNotFoundError(
                f"this machine has no folder {path}: bind gateway.host to an address that it reaches, set "
                "weights.peer_url, or have weights.store name a folder that all machines share"
            )
        prefetch = self.prefetch
        self.drop_receipt()
        _end_reload(worker)
        if Path(path).is_dir():
            prefetched = prefetch.take(Path(path)) if prefetch is not None else None
            self._load_folder(iter(prefetched or read_tensors(Path(path), worker.device)))
        else:
            worker.reload_weights()
        worker._weight_update_active = False
        rebuild_tied_head(worker.get_model())

    def _load_folder(self, tensors: Iterator[NamedTensor]) -> None:
        worker: Any = self
        in_place = self._begin_in_place()
        if in_place is None:
            with base_layers(worker.get_model()) if worker.vllm_config.lora_config is not None else nullcontext():
                worker.reload_weights(weights_iterator=tensors)
            return
        in_place.load_all(tensors, _BATCH_BYTES)
        # As vLLM does after a reload: its cached image encodings are of the old weights.
        worker.model_runner.reset_encoder_cache()
        worker.model_runner.reset_mm_cache()

    @cached_property
    def receipts(self) -> Receipts:
        return Receipts()

    @cached_property
    def obstacle(self) -> str:
        """The reason why weights are not loaded in place; "" where they are."""
        return obstacle(self)

    @cached_property
    def in_place(self) -> PlannedLoad | None:
        """The planned load in place; None for a model with an `obstacle`."""
        worker: Any = self
        return None if self.obstacle else PlannedLoad(worker.get_model(), _loader(worker))

    @property
    def _load(self) -> Load:
        """The loader of an update's tensors: in place, by the names of a checkpoint, or the model's own."""
        worker: Any = self
        return self.in_place.load if self.in_place is not None else _loader(worker) or worker.get_model().load_weights

    def _begin_in_place(self) -> PlannedLoad | None:
        """Return `in_place`, ready to load all or some weights."""
        if self.in_place is not None:
            self.in_place.begin()
        return self.in_place


def _loader(worker: Any) -> Load | None:
    """Return a loader for a LoRA-enabled model, whose own loader does not know the checkpoint's names; else None."""
    return loader_of(worker.get_model()) if worker.vllm_config.lora_config is not None else None


def _loading(worker: Any) -> ExitStack:
    """Return a context as vLLM's own around its receivers: an update may lack tensors that a checkpoint has."""
    from vllm.config import set_current_vllm_config

    stack = ExitStack()
    stack.enter_context(set_current_vllm_config(worker.vllm_config))
    with suppress(ImportError):  # older vLLM makes no such check
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        stack.enter_context(disable_mtp_completeness_check())
    return stack


def _expected(model_config: Any) -> tuple[TensorMeta, ...]:
    """Return the tensors that a trainer of this model sends, by its checkpoint, in the dtype of the engine."""
    folder = Path(model_config.model)
    tensors = read_checkpoint(folder) if folder.is_dir() else None
    return served_in(str(model_config.dtype).removeprefix("torch."), tensors or ())


def _end_reload(worker: Any) -> None:
    """End an unfinished layerwise reload.

    vLLM would continue it with the next reload, and a load in place would leave it open.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = worker.get_model()
    if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
        with set_current_vllm_config(worker.vllm_config):
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
