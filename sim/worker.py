"""The simulated engine's worker: the methods of our vLLM worker extension, on tensors of zeros."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.engine import Json, ReceiptCopy
from engines.errors import StoreFailed, WeightUpdateConflict
from engines.store.draft import Draft, RawTensor, raw
from engines.store.manifest import check_bytes, digest_of


class SimWorker:
    """The methods that /collective_rpc reaches."""

    def __init__(self, model_name: str, tensors: dict[str, list[int]], stage_bytes: int = 0) -> None:
        self._name = model_name
        self._tensors = tensors
        self._stage_bytes = stage_bytes
        self._damaged: set[str] = set()
        self._copy: ReceiptCopy | None = None
        self._received: dict[str, RawTensor] = {}
        self._receives = False

    def damage(self, name: str) -> None:
        """Let tensor `name` arrive with a wrong byte from now on."""
        self._damaged.add(name)

    def see(self, names: list[str], shapes: list[list[int]]) -> None:
        """Record received tensors."""
        if self._receives:
            self._received |= {name: self._zeros(name, shape) for name, shape in zip(names, shapes, strict=True)}

    async def call(self, method: str, arguments: Json) -> Any:
        match method:
            case "open_receipt":
                self._copy = ReceiptCopy(**arguments) if arguments else None
                self._received, self._receives = {}, True
            case "close_receipt":
                self._receives = False
                return {name: tensor.digest for name, tensor in self._received.items()}
            case "keep_receipt":
                copy, self._copy = self._copy, None
                if copy is not None:
                    await asyncio.to_thread(_write, copy, list(self._received.values()))
            case "wipe_kv":
                pass
            case "announced_as":
                return arguments["update_info"]
            case "drop_receipt":
                self._copy, self._receives = None, False
            case "room_to_stage":
                return {"room": arguments["num_bytes"] <= self._stage_bytes}
            case "damage":
                self.damage(arguments["name"])
            case "heal":
                self._damaged.clear()
            case "plan_updates":
                return {"obstacle": ""}
            case "prepare_snapshot":
                return {"ready": True}
            case "load_snapshot":
                await asyncio.to_thread(self._load, arguments["path"])
            case _:
                raise WeightUpdateConflict(f"the worker has no method {method!r}")
        return None

    def _load(self, path: str) -> None:
        if path == self._name:
            return  # the checkpoint has no file
        found = {name: tensor.shape for name, tensor in check_bytes(Path(path)).tensors.items()}
        if found != self._tensors:
            raise WeightUpdateConflict(f"{path} does not hold the model's tensors")

    def _zeros(self, name: str, shape: list[int]) -> RawTensor:
        content = bytearray(4 * math.prod(shape))
        if name in self._damaged:
            content[0] = 1
        return replace(raw(name, "float32", shape, content), digest=digest_of(content))


def _write(copy: ReceiptCopy, tensors: list[RawTensor]) -> None:
    draft = Draft(Path(copy.draft), copy.model)
    try:
        draft.add(tensors)
        draft.complete_from(Path(copy.base) if copy.base else None, copy.names)
        draft.finish()
    except StoreFailed as error:
        draft.fail(str(error))
