"""The extension of vLLM's workers (`--worker-extension-cls`). A call of /collective_rpc reaches all workers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from engines.inside_vllm.base_layers import base_layers, loader_of
from engines.inside_vllm.gloo_receiver import rebuild_tied_head
from engines.inside_vllm.in_place import load_in_place, load_layerwise, obstacle
from engines.loading.planned_load import PlannedLoad
from engines.loading.snapshot_reader import pin_memory, read_tensors
from engines.loading.stage import FolderStage
from engines.loading.worker import UpdatedWorker
from engines.transfer.gloo import until_listening
from engines.transfer.packing import unpack_quickly
from engines.transfer.tee import prepare


class WeightWorker(UpdatedWorker):
    """Mixed into vLLM's worker class, so that `self` is the worker. Names here must differ from the worker's own."""

    def open_receipt(self, **copy: Any) -> None:
        """Digest received tensors from now on. With `copy`, the fields of `ReceiptCopy`, the first worker also copies
        them."""
        worker: Any = self
        self.drop_receipt()
        _end_reload(worker)
        prepare(worker.device)  # a server that others start plans no updates
        if worker.device.type == "cuda":
            unpack_quickly()
            pin_memory()
        if not self.target.obstacle:
            load_in_place(worker.weight_transfer_engine)
        is_first = worker.rank == 0 and worker.parallel_config.data_parallel_index == 0
        self.begin_receipt(worker.weight_transfer_engine.model, copy, is_first=is_first)

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive the announced tensors beside the weights, after `open_receipt`. The engine goes on."""
        worker: Any = self
        engine = worker.weight_transfer_engine
        self.begin_stage(update_info, engine.update_weights, partial(break_group, engine))

    def drop_receipt(self) -> None:
        worker: Any = self
        load_layerwise(worker.weight_transfer_engine)
        super().drop_receipt()

    def end_update(self) -> None:
        """Finish an open update, if any, whatever its weights are: vLLM refuses to finish twice."""
        worker: Any = self
        self.drop_receipt()
        if worker._weight_update_active:
            worker.finish_weight_update()

    def plan_updates(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        worker: Any = self
        find_trainer_first(worker.weight_transfer_engine)
        return super().plan_updates(*args, **kwargs)

    def kv_memory(self) -> object:
        """Return the KV of all layers, but for those with sinks: vLLM writes these there once."""
        worker: Any = self
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return [getattr(layer, "kv_cache", ()) for layer in layers if not getattr(layer, "sink_len", 0)]

    def load_version(self, folder: Path, stage: FolderStage | None) -> None:
        worker: Any = self
        _end_reload(worker)
        if not folder.is_dir():
            _reload(worker)
        elif self.target.obstacle:
            tensors = read_tensors(folder, worker.device) if stage is None else iter(stage.take())
            with self.loading(), _base_layers(worker):
                _reload(worker, weights_iterator=tensors)
        else:
            self.load_folder(folder, stage)
        worker._weight_update_active = False
        rebuild_tied_head(worker.get_model())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """As vLLM's own around its receivers: an update may lack tensors that a checkpoint has."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        worker: Any = self
        with set_current_vllm_config(worker.vllm_config), disable_mtp_completeness_check(), super().loading():
            yield

    @cached_property
    def target(self) -> PlannedLoad:
        worker: Any = self
        model = worker.get_model()
        load = loader_of(model) if worker.vllm_config.lora_config is not None else None
        return PlannedLoad(model, load, device=worker.device, obstacle=obstacle(self))


def _reload(worker: Any, **source: Any) -> None:
    """Have vLLM reload the weights, but keep encodings of images, which it would drop in the workers alone.

    Its scheduler believes them to be there, and the next request with such an image would end the engine.
    `VllmEngine.wipe_kv` drops them on both sides.
    """
    runner = worker.model_runner
    forget, runner.reset_encoder_cache = runner.reset_encoder_cache, lambda: None
    try:
        worker.reload_weights(**source)
    finally:
        runner.reset_encoder_cache = forget


def _base_layers(worker: Any) -> AbstractContextManager[None]:
    """Have the model's layers under the checkpoint's names, in a LoRA-enabled model too."""
    return base_layers(worker.get_model()) if worker.vllm_config.lora_config is not None else nullcontext()


def break_group(engine: Any) -> None:
    """End a collective in another thread. NCCL's can only be aborted."""
    if (group := getattr(engine, "model_update_group", None)) is None:
        engine.shutdown()
        return
    engine.model_update_group = None
    with suppress(RuntimeError):  # of a communicator that is broken already
        group.nccl.ncclCommAbort(group.comm)


def find_trainer_first(engine: Any) -> None:
    """Let a transfer engine of vLLM join no group before its trainer listens, once for each engine.

    The wait of vLLM's store for a trainer that has died takes 300 s, and the worker answers no other call meanwhile.
    """
    join = getattr(engine, "init_transfer_engine", None)
    if join is None or hasattr(join, "finds_trainer"):
        return

    def find_and_join(init_info: Any) -> None:
        # Backends without a rendezvous, such as CUDA IPC, name no place.
        address, port = (getattr(init_info, name, None) for name in ("master_address", "master_port"))
        if address is not None and port is not None:
            until_listening(address, port)
        join(init_info)

    find_and_join.finds_trainer = True  # type: ignore[attr-defined]
    engine.init_transfer_engine = find_and_join


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
