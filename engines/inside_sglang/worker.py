"""The gateway's calls in one worker of SGLang. Each reaches all workers, and is answered for all of them."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from engines.errors import WeightUpdateFailed
from engines.inside_sglang.draft import draft_of, draft_runners
from engines.inside_sglang.nccl_group import NcclGroup
from engines.inside_sglang.obstacles import obstacle_to_updates
from engines.loading.planned_load import PlannedLoad, form_of
from engines.loading.prefetch import Prefetch
from engines.loading.snapshot_reader import pin_memory
from engines.loading.stage import synchronize
from engines.loading.worker import Target, UpdatedWorker, tensors_of
from engines.transfer.gloo import WeightGroup, receive
from engines.transfer.packing import CHUNK_BYTES, Announced
from engines.transfer.tee import prepare
from engines.types import TensorMeta

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
_ENCODERS = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Modules with `embedding_cache`: what the weights made of images, by their hash. SGLang's flush keeps it. The second
is that of SGLang 0.5.17."""
_SWITCH_S = 1e-4
"""SGLang's scheduler spins while it is idle or paused. Each call of ours that lets go of the GIL would wait Python's
5 ms to have it again: an idle server received 15 GB over NCCL in 0.5 s, a busy server in 0.06 s."""


class _Group(Protocol):
    """The trainer's group, over NCCL or gloo."""

    def join(self) -> None: ...

    def close(self, reason: str = ...) -> None: ...


class WeightWorker(UpdatedWorker):
    """The part of one worker. `manager` is SGLang's own part."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._runner = manager.tp_worker.model_runner
        self._group: _Group | None = None
        self._chunk_bytes = CHUNK_BYTES

    def plan_updates(self, tensors: Sequence[dict[str, Any]] = ()) -> str:
        """Prepare for updates of these tensors: the first is then as fast as the next.

        Return why updates are left to SGLang's own routes; "" where they are ours.
        """
        if not self.target.obstacle:
            prepare(self.target.device)
            if self.target.device.type == "cuda":
                pin_memory()
            self.target.plan([form_of(TensorMeta(**{**one, "shape": tuple(one["shape"])})) for one in tensors])
        return self.target.obstacle

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
        """Join the trainer's group. Any earlier group is left first, so a new trainer may come at any time."""
        self._check_takes_updates()
        self.close_group()
        rank = rank_offset + self._runner.weight_updater.tp_rank
        device = self.target.device
        group: _Group
        if device.type == "cuda":
            group = NcclGroup(address, port, rank, world_size, timeout_s, device, buffers)
        else:
            group = WeightGroup(address, port, rank, world_size, timeout_s)
        group.join()
        self._group, self._chunk_bytes = group, chunk_bytes

    def close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

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
        self.begin_stage(_Receiver(self, timeout_s), update_info)

    def prepare_snapshot(self, *args: Any, **kwargs: Any) -> Any:
        return True if self.target.obstacle else super().prepare_snapshot(*args, **kwargs)

    def kv_memory(self) -> object:
        """Return the KV of the target and of its draft, which reads what the target has computed."""
        return [_known_kv(runner.token_to_kv_pool) for runner in (self._runner, *draft_runners(self._manager))]

    def wipe_kv(self) -> None:
        for module in _ENCODERS:
            if (encodings := getattr(sys.modules.get(module), "embedding_cache", None)) is not None:
                encodings.clear()
        super().wipe_kv()

    def load_version(self, folder: Path, prefetch: Prefetch | None) -> bool:
        if self.target.obstacle or not folder.is_dir():
            return False
        self._synchronize()
        self.exchange = self.target.load_folder(folder, prefetch)
        self._synchronize()
        return True

    def answer_of(self, word: str, value: object) -> object:
        return value

    @contextmanager
    def loading(self) -> Iterator[None]:
        assert self.target.in_place is not None
        self.target.in_place.begin()
        self._synchronize()  # a step may still read the weights
        yield
        self._synchronize()

    @cached_property
    def target(self) -> Target:
        """An `obstacle` is the reason why updates are left to SGLang's own routes."""
        reason, in_place = obstacle_to_updates(self._manager), PlannedLoad(self._model)
        return Target(
            device=next(self._model.parameters()).device,
            obstacle=reason,
            in_place=None if reason else in_place,
            own_load=in_place.load,
            draft=None if reason else draft_of(self._manager),
        )

    def leave(self, reason: str) -> None:
        """Leave the group from another thread than that of a receive, which ends."""
        if self._group is not None:
            self._group.close(reason)

    def _receive(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Hand all tensors announced to the tee. On any error the group is left, which frees the trainer."""
        group = self._group
        if group is None:
            raise WeightUpdateFailed("no weight group: call init_weight_transfer_engine first")
        dtypes = [getattr(torch, name) for name in update_info["dtype_names"]]
        announced: list[Announced] = list(zip(update_info["names"], dtypes, update_info["shapes"], strict=True))
        load = self._model.load_weights if "load_weights" in vars(self._model) else self.target.load
        try:
            if isinstance(group, NcclGroup):
                group.receive(announced, load, self._chunk_bytes, timeout_s)
            elif isinstance(group, WeightGroup):
                receive(announced, group, load, self._chunk_bytes)
        except Exception as error:
            group.close(f"{type(error).__name__}: {error}")
            self._group = None
            raise

    @property
    def _model(self) -> Any:
        return self._runner.model

    def _check_takes_updates(self) -> None:
        if self.target.obstacle:
            raise WeightUpdateFailed(
                f"this SGLang server receives no updates ({self.target.obstacle}): have it load them from the store "
                "(WeightSender(transport='store'), or weights.relay: always)"
            )

    def _synchronize(self) -> None:
        """Wait for all work on the device: steps overlap with SGLang's scheduler, whose thread this is."""
        synchronize(self.target.device)


class _Receiver:
    """Plays vLLM's transfer engine to `Stage`, which knows no more of it."""

    def __init__(self, worker: WeightWorker, timeout_s: float) -> None:
        self._worker = worker
        self._timeout_s = timeout_s

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._worker._receive(update_info, self._timeout_s)

    def shutdown(self) -> None:
        self._worker.leave("the update was dropped")


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
