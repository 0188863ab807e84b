"""The gateway's calls in one worker of SGLang. Each reaches all workers, and is answered for all of them."""

import json
import logging
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from engines.errors import WeightUpdateFailed
from engines.inside_sglang.nccl_group import NcclGroup
from engines.inside_sglang.obstacles import obstacle_to_updates
from engines.loading.planned_load import PlannedLoad, form_of
from engines.loading.prefetch import Prefetch
from engines.loading.receipts import Receipts
from engines.loading.snapshot_reader import pin_buffers, read_tensors
from engines.loading.stage import Stage
from engines.store.peer_store import PeerStore, fetched
from engines.transfer.gloo import CHUNK_BYTES, Announced, WeightGroup, receive
from engines.transfer.tee import prepare, room_on
from engines.types import TensorMeta

log = logging.getLogger(__name__)

_BATCH_BYTES = 512 << 20
"""Batch of a folder's tensors: large enough that loaders run seldom, small enough for a full GPU."""


class _Group(Protocol):
    """The trainer's group, over NCCL or gloo."""

    def join(self) -> None: ...

    def close(self, reason: str = ...) -> None: ...


class WeightWorker:
    """The part of one worker. `manager` is SGLang's own part."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._runner = manager.tp_worker.model_runner
        self._receipts = Receipts()
        self._group: _Group | None = None
        self._chunk_bytes = CHUNK_BYTES
        self._prefetch: Prefetch | None = None
        self._stage: Stage | None = None

    def plan_updates(self, tensors: Sequence[dict[str, Any]] = ()) -> str:
        """Prepare for updates of these tensors: the first is then as fast as the next.

        Return why updates are left to SGLang's own routes; "" where they are ours.
        """
        if not self.obstacle:
            prepare(self._device)
            if self._device.type == "cuda":
                pin_buffers(self._device)
            self._in_place.begin()
            self._in_place.plan(form_of(TensorMeta(**{**one, "shape": tuple(one["shape"])})) for one in tensors)
        return self.obstacle

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
        device = self._device
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

    def open_receipt(
        self, draft: str = "", model: str = "", base: str = "", names: Sequence[str] = (), wait_s: float = 0.0
    ) -> None:
        """Digest received tensors from now on. With `draft`, the first worker also copies them into that folder."""
        self._check_takes_updates()
        is_first = self._runner.weight_updater.tp_rank == 0
        self._in_place.begin()
        self._receipts.open(
            self._model,
            self._in_place.load,
            draft=draft if is_first else "",
            checkpoint=model,
            base=base,
            names=names,
            wait_s=wait_s,
        )

    def receive(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receive and load all tensors announced."""
        self._in_place.begin()
        self._synchronize()  # a step may still read the weights
        self._receive(update_info, timeout_s)
        self._synchronize()

    def room_to_stage(self, num_bytes: int) -> bool:
        """Return True if tensors of so many bytes fit beside the weights, without those that an update has left."""
        self.drop_receipt()
        return num_bytes <= room_on(self._device)

    def stage_weights(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Begin to receive the announced tensors beside the weights, after `open_receipt`. The engine goes on."""
        if self._stage is None:
            stage = Stage(_Receiver(self, timeout_s), self._device)
            self._receipts.load_by(stage.add)
            self._stage = stage
        self._stage.receive(update_info)

    def staged(self) -> bool:
        """Return True once the announced tensors are here. Raises the error of their receiver."""
        return self._stage is not None and self._stage.is_ready

    def load_staged(self) -> None:
        """Load the staged tensors into the weights."""
        stage, self._stage = self._stage, None
        if stage is None or not stage.is_ready:
            raise WeightUpdateFailed("load_staged without staged tensors")
        self._in_place.begin()
        self._synchronize()
        stage.load_by(self._in_place.load)

    def close_receipt(self) -> dict[str, str]:
        """Return the digest of each received tensor. The copy is finished by `keep_receipt`."""
        return self._receipts.close()

    def keep_receipt(self) -> None:
        """Finish the draft in the background, or note there why it failed: the update is committed."""
        self._receipts.keep()

    def drop_receipt(self) -> None:
        """Stop digesting and copying; the draft and staged tensors are discarded."""
        self._prefetch = None
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.drop()
        self._receipts.drop()

    def prepare_snapshot(
        self, path: str, version: int = 0, peer_url: str = "", peer_key: str = "", timeout_s: float = 0.0
    ) -> bool:
        """Begin to prefetch a folder, with the arguments of `load_snapshot`. Return True once it has ended."""
        folder = Path(path)
        fetch = partial(fetched, folder, PeerStore(peer_url, peer_key), version, timeout_s) if peer_url else None
        if self.obstacle or (fetch is None and (self._device.type == "cpu" or not folder.is_dir())):
            return True
        if self._prefetch is None or not self._prefetch.is_of(folder):
            self._prefetch = Prefetch(folder, self._device, fetch)
        try:
            return self._prefetch.is_ready
        except Exception:
            self._prefetch = None
            raise

    def load_snapshot(
        self, path: str, version: int = 0, peer_url: str = "", peer_key: str = "", timeout_s: float = 0.0
    ) -> bool:
        """Load all weights from a checkpoint folder, also after an update that broke off.

        With `peer_url`, a folder that this machine lacks is fetched from there as version `version`. Return False
        where SGLang's own route has to load them.
        """
        folder = Path(path)
        if peer_url:
            fetched(folder, PeerStore(peer_url, peer_key), version, timeout_s)
        elif version and not folder.is_dir():
            raise FileNotFoundError(
                f"this machine has no folder {path}: bind gateway.host to an address that it reaches, set "
                "weights.peer_url, or have weights.store name a folder that all machines share"
            )
        prefetch = self._prefetch
        self.drop_receipt()
        if self.obstacle or not folder.is_dir():
            return False
        self._synchronize()
        self._in_place.begin()
        prefetched = prefetch.take(folder) if prefetch is not None else None
        self._in_place.load_all(iter(prefetched or read_tensors(folder, self._device)), _BATCH_BYTES)
        self._synchronize()
        return True

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
        load = self._model.load_weights if "load_weights" in vars(self._model) else self._in_place.load
        try:
            if isinstance(group, NcclGroup):
                group.receive(announced, load, self._chunk_bytes, timeout_s)
            elif isinstance(group, WeightGroup):
                receive(announced, group, load, self._chunk_bytes)
        except Exception as error:
            group.close(f"{type(error).__name__}: {error}")
            self._group = None
            raise

    @cached_property
    def obstacle(self) -> str:
        """The reason why updates are left to SGLang's own routes; "" where they are not."""
        return obstacle_to_updates(self._manager)

    @cached_property
    def _in_place(self) -> PlannedLoad:
        return PlannedLoad(self._model)

    @property
    def _model(self) -> Any:
        return self._runner.model

    @cached_property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _check_takes_updates(self) -> None:
        if self.obstacle:
            raise WeightUpdateFailed(
                f"this SGLang server receives no updates ({self.obstacle}): have it load them from the store "
                "(WeightSender(transport='store'), or weights.relay: always)"
            )

    def _synchronize(self) -> None:
        """Wait for all work on the device: steps overlap with SGLang's scheduler, whose thread this is."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Receiver:
    """Plays vLLM's transfer engine to `Stage`, which knows no more of it."""

    def __init__(self, worker: WeightWorker, timeout_s: float) -> None:
        self._worker = worker
        self._timeout_s = timeout_s

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._worker._receive(update_info, self._timeout_s)

    def shutdown(self) -> None:
        self._worker.leave("the update was dropped")


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
