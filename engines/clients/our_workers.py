"""The weight calls that our code in an engine's workers answers, the same for vLLM and SGLang."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engines.clients.http import HttpEngine
from engines.engine import Json, Preparation, ReceiptCopy
from engines.errors import EngineFailed, InvalidRequest
from engines.types import TensorMeta
from engines.weight_label import CHECKPOINT, UNKNOWN, WeightLabel, open_label

_LOOKS_S = 0.002, 0.05
"""Shortest and longest time between two looks at workers that receive or read. An engine answers between two steps."""
_LATE = 1 / 16
"""Share of the time so far by which a look may be late."""


class EngineWithWorkers(HttpEngine, ABC):
    """A server whose workers may run our code.

    api_key: the server's bearer key, if it needs one.
    has_tee: they do: `engines/inside_vllm` or `engines/inside_sglang`.
    """

    def __init__(self, replica_id: str, url: str, api_key: str = "", *, has_tee: bool = False) -> None:
        super().__init__(replica_id, url, api_key)
        self._has_tee = has_tee
        self._held: str | None = None
        """The label that was read or given last; None before, and while it changes."""
        self._committed = CHECKPOINT
        """The label of the last commit that was read or made here."""

    @abstractmethod
    async def _on_workers(self, method: str, arguments: Json, timeout_s: float) -> list[Any]:
        """Call a method of all workers; return their answers."""

    @abstractmethod
    def _receive(self, update_info: Json, timeout_s: float) -> Json:
        """Return the workers' arguments for a receive of the announced tensors."""

    @abstractmethod
    async def _load_by_itself(self, path: str, timeout_s: float) -> None:
        """Have the engine's own code load all weights from a checkpoint folder."""

    @abstractmethod
    async def _told_label(self, timeout_s: float) -> str:
        """Return the label of the weights, "" where the engine knows no labels."""

    @abstractmethod
    async def _set_label(self, label: str, timeout_s: float) -> None:
        """Label the weights, where the engine knows labels."""

    async def weight_label(self, timeout_s: float) -> WeightLabel:
        self._held = await self._told_label(timeout_s)
        label = WeightLabel.read(self._held) if self._held else UNKNOWN
        self._committed = label.committed
        return label

    async def prepare_updates(
        self, tensors: Sequence[TensorMeta], config: str, tied: Sequence[Sequence[str]], timeout_s: float
    ) -> Preparation:
        if not self._has_tee:
            return Preparation()
        told = {"tensors": [*map(asdict, tensors)], "config": config, "tied": tied}
        said = await self._on_workers("plan_updates", told, timeout_s)
        return Preparation(has_tee=True, obstacle=next((one["obstacle"] for one in said if one["obstacle"]), ""))

    async def announced_as(self, update_info: Json, timeout_s: float) -> Json:
        if not self._has_tee:
            return update_info
        first, *_ = await self._on_workers("announced_as", {"update_info": update_info}, timeout_s)
        if "refused" in first:
            raise InvalidRequest(first["refused"], param="update_info.names")
        return dict(first)

    async def room_to_stage(self, num_bytes: int, timeout_s: float) -> bool:
        if not self._has_tee:
            return False
        return _all_say("room", await self._on_workers("room_to_stage", {"num_bytes": num_bytes}, timeout_s))

    async def stage_weights(self, update_info: Json, timeout_s: float) -> None:
        await self._on_workers("stage_weights", self._receive(update_info, timeout_s), timeout_s)
        await self._until_ready("staged", {}, timeout_s)

    async def load_staged(self, timeout_s: float) -> None:
        await self._on_workers("load_staged", {}, timeout_s)

    async def wipe_kv(self, timeout_s: float) -> None:
        if self._has_tee:
            await self._on_workers("wipe_kv", {}, timeout_s)

    async def open_receipt(self, copy: ReceiptCopy | None, timeout_s: float) -> None:
        if self._has_tee:
            await self._on_workers("open_receipt", asdict(copy) if copy else {}, timeout_s)

    async def close_receipt(self, timeout_s: float) -> dict[str, str]:
        if not self._has_tee:
            return {}
        first, *others = await self._on_workers("close_receipt", {}, timeout_s)
        for rank, digests in enumerate(others, 1):
            if digests != first:
                raise EngineFailed(f"workers 0 and {rank} received different bytes", replica_id=self.replica_id)
        return dict(first)

    async def keep_receipt(self, timeout_s: float) -> None:
        if self._has_tee:
            await self._on_workers("keep_receipt", {}, timeout_s)

    async def drop_receipt(self, timeout_s: float) -> None:
        if self._has_tee:
            await self._on_workers("drop_receipt", {}, timeout_s)

    async def prepare_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        if self._has_tee:
            await self._until_ready("prepare_snapshot", {"path": path, "version": version}, timeout_s)

    async def load_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        await self._label("", timeout_s)
        asked = {"path": path, "version": version}
        # Our worker in SGLang answers False for a version that it leaves to SGLang.
        if not self._has_tee or False in await self._on_workers("load_snapshot", asked, timeout_s):
            await self._load_by_itself(path, timeout_s)

    async def label_weights(self, label: str, timeout_s: float, *, is_committed: bool) -> None:
        await self._label(label, timeout_s, is_committed=is_committed)

    async def _label(self, label: str, timeout_s: float, *, is_committed: bool = False) -> None:
        """Label the weights; `label` is "" for those that are being overwritten."""
        text = label if is_committed else open_label(label, self._committed)
        self._held = None
        await self._set_label(text, timeout_s)
        self._held = text
        if is_committed:
            self._committed = label

    async def _until_ready(self, method: str, arguments: Json, timeout_s: float) -> None:
        """Poll the workers until all are ready: a call that waits there would block the engine's steps."""
        began, (shortest_s, longest_s) = time.monotonic(), _LOOKS_S
        while not _all_say("ready", await self._on_workers(method, arguments, timeout_s)):
            waited_s = time.monotonic() - began
            await asyncio.sleep(min(max(shortest_s, waited_s * _LATE), longest_s))


def _all_say(word: str, workers: Sequence[Any]) -> bool:
    """Return True if all workers answer yes: SGLang's with True, vLLM's with it under `word`."""
    return all(answer[word] if isinstance(answer, dict) else answer for answer in workers)
