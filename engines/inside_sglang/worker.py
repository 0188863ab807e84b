"""The gateway's calls in one worker of SGLang. Each reaches all workers, and is answered for all of them."""

import json
import logging
import sys
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from engines.errors import WeightUpdateFailed
from engines.inside_sglang.nccl_group import NcclGroup
from engines.inside_sglang.obstacles import obstacle_to_updates
from engines.loading.planned_load import PlannedLoad
from engines.loading.stage import FolderStage
from engines.loading.worker import UpdatedWorker, tensors_of
from engines.transfer.gloo import Receiver, WeightGroup
from engines.transfer.packing import CHUNK_BYTES

log = logging.getLogger(__name__)

_KV = (
    "k_buffer", "v_buffer", "kv_buffer", "k_scale_buffer", "v_scale_buffer", "kv_scale_buffer",
    "native_k_scale_buffer", "native_v_scale_buffer",
    "index_k_payload_buffer", "index_k_scale_buffer", "index_k_with_scale_buffer",
    "buffer",  # of an index_key_cache
)  # fmt: skip
_POOLS = (
    "full_kv_pool", "swa_kv_pool", "dense_pool", "main_pool", "index_k_pool", "index_kv_pool", "index_key_cache",
)  # fmt: skip
_ENCODERS = "sglang.srt.managers.mm_schedule"
"""Module with `embedding_cache`: what the weights made of images, by their hash. SGLang's flush keeps it."""
_SWITCH_S = 1e-4
"""SGLang's scheduler spins while it is idle or paused. Each call of ours that lets go of the GIL would wait Python's
5 ms to have it again: an idle server received 15 GB over NCCL in 0.5 s, a busy server in 0.06 s."""


class WeightWorker(UpdatedWorker):
    """The part of one worker. `manager` is SGLang's own part."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._runner = manager.tp_worker.model_runner
        self._receiver = Receiver()

    def plan_updates(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        obstacle = self.target.obstacle
        return {"obstacle": obstacle} if obstacle else super().plan_updates(*args, **kwargs)

    def open_group(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        timeout_s: float,
        chunk_bytes: int = CHUNK_BYTES,
        buffers: int = 2,
    ) -> None:
        """Join the trainer's group."""
        self._check_takes_updates()
        place = address, port, rank_offset + self._runner.weight_updater.tp_rank, world_size, timeout_s
        device = self.target.device
        group = NcclGroup(*place, device, buffers) if device.type == "cuda" else WeightGroup(*place)
        self._receiver.join(group, chunk_bytes)

    def close_group(self) -> None:
        self._receiver.leave()

    def open_receipt(self, **copy: Any) -> None:
        """Digest received tensors from now on. With `copy`, the fields of `ReceiptCopy`, the first worker also copies
        them."""
        self._check_takes_updates()
        self.drop_receipt()
        self.begin_receipt(self._model, copy, is_first=self._runner.weight_updater.tp_rank == 0)

    def receive(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receive and load all tensors announced."""
        with self.loading():
            self._receive(update_info, timeout_s)

    def stage_weights(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Begin to receive the announced tensors beside the weights, after `open_receipt`. The engine goes on."""
        receive, leave = (
            partial(self._receive, timeout_s=timeout_s),
            partial(self._receiver.leave, "the update was dropped"),
        )
        self.begin_stage(update_info, receive, leave)

    def prepare_snapshot(self, *args: Any, **kwargs: Any) -> dict[str, bool]:
        return {"ready": True} if self.target.obstacle else super().prepare_snapshot(*args, **kwargs)

    def kv_memory(self) -> object:
        """Return the KV of the target and of its draft, which reads what the target has computed."""
        return [_known_kv(runner.token_to_kv_pool) for runner in (self._runner, *_draft_runners(self._manager))]

    def wipe_kv(self) -> None:
        if (encodings := getattr(sys.modules.get(_ENCODERS), "embedding_cache", None)) is not None:
            encodings.clear()
        super().wipe_kv()

    def load_version(self, folder: Path, stage: FolderStage | None) -> bool:
        if self.target.obstacle or not folder.is_dir():
            return False
        self.load_folder(folder, stage)
        return True

    @cached_property
    def target(self) -> PlannedLoad:
        """An `obstacle` is the reason why updates are left to SGLang's own routes."""
        device, obstacle = next(self._model.parameters()).device, obstacle_to_updates(self._manager)
        return PlannedLoad(self._model, device=device, obstacle=obstacle)

    def _receive(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Hand all tensors announced to the tee."""
        load = self._model.load_weights if "load_weights" in vars(self._model) else self.target.load
        self._receiver.receive(update_info, load, timeout_s)

    @property
    def _model(self) -> Any:
        return self._runner.model

    def _check_takes_updates(self) -> None:
        if self.target.obstacle:
            raise WeightUpdateFailed(
                f"this SGLang server receives no updates ({self.target.obstacle}): have it load them from the store "
                "(WeightSender(transport='store'), or weights.relay: always)"
            )


def _draft_runners(manager: Any) -> list[Any]:
    """Return SGLang's runners of the draft's models in this worker; none where it has no model."""
    told = [] if manager.draft_worker is None else manager.draft_worker.weight_update_runners()
    return [runner for _, runner in told]


def _known_kv(pool: Any) -> list[object]:
    """Return the KV of a runner's pool. Raise `WeightUpdateFailed` where its memory has names that we do not know."""
    found = _kv_of(pool)
    if not _is_unmapped(pool) and next(tensors_of(found), None) is None:
        raise WeightUpdateFailed(f"the KV in a {type(pool).__name__} of SGLang's is not known, and stays as it is")
    return found


def _kv_of(pool: Any) -> list[object]:
    """Return the KV in a pool of SGLang's and in the pools that it holds."""
    if _is_unmapped(pool):
        return []
    inner = [getattr(pool, name, None) for name in _POOLS]
    return [getattr(pool, name, None) for name in _KV] + [_kv_of(one) for one in inner if one is not None]


def _is_unmapped(pool: Any) -> bool:
    """Return True for a pool of which parts have no memory behind them."""
    return bool(getattr(pool, "post_capture_active", False))


_workers: list[WeightWorker] = []  # of this process: one, made at the first call


def answer(manager: Any, method: str, arguments: dict[str, Any]) -> Any:
    """Return SGLang's reply with the answers of all workers as JSON, or with the errors of those that failed."""
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    outcomes = _gathered(_outcome(manager, method, arguments), manager.tp_cpu_group)
    errors = [f"worker {rank}: {one['error']}" for rank, one in enumerate(outcomes) if "error" in one]
    if errors:
        return CheckWeightsReqOutput(success=False, message="; ".join(errors))
    return CheckWeightsReqOutput(success=True, message=json.dumps([one["answer"] for one in outcomes]))


def _outcome(manager: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        if not _workers:
            sys.setswitchinterval(_SWITCH_S)
            _workers.append(WeightWorker(manager))
        return {"answer": getattr(_workers[0], method)(**arguments)}
    except Exception as error:
        log.exception("%s failed", method)
        return {"error": f"{type(error).__name__}: {error}"}


def _gathered(own: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    """Return the outcomes of all workers of this server, in the order of their ranks."""
    outcomes: list[Any] = [None] * torch.distributed.get_world_size(group=group)
    torch.distributed.all_gather_object(outcomes, own, group=group)
    return outcomes
