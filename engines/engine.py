"""The interface of a running engine. Each kind of server has a class, which speaks vLLM's dialect to the gateway."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import orjson

from engines.chunks import Chunk
from engines.errors import EngineFailed, InvalidRequest
from engines.types import PauseMode, TensorMeta
from engines.weight_label import CHECKPOINT, WeightLabel, open_label

Json = dict[str, Any]
Take = Callable[[list[Chunk]], None]
"""Takes the chunks of a reply that came together."""

_LOOKS_S = 0.002, 0.05
"""Shortest and longest time between two looks at workers that receive or read. An engine answers between two steps."""
_LATE = 1 / 16
"""Share of the time so far by which a look may be late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptCopy:
    """A copy of received weights: the engine writes it to folder `draft` of the weight store, for `model`.

    Missing tensors among `names` are copied from folder `base`. The transfer waits at most `wait_s` for the disk.
    """

    draft: str
    model: str
    base: str
    names: tuple[str, ...]
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What an engine's workers say of updates.

    has_tee: True if our code there receives them.
    obstacle: why an update is a slower reload by the engine itself; "" if it is loaded in place, or unknown.
    """

    has_tee: bool = False
    obstacle: str = ""


def body_in_json(body: Json | bytes | None) -> bytes:
    """The JSON of a request's body; no bytes where there is none."""
    if body is None or isinstance(body, bytes):
        return body or b""
    try:
        return orjson.dumps(body)
    except TypeError as error:  # more than 254 levels, or text that is no UTF-8
        raise InvalidRequest(f"the body cannot be passed on as JSON: {error}") from error


class Beside(Protocol):
    """A reader beside the engine, which makes all calls to it. Errors are those of the engine."""

    async def read(
        self, path: str, body: Json, timeout_s: float, take: Take, *, is_whole: bool, streams: bool
    ) -> None: ...
    async def call(self, method: str, path: str, body: Json | bytes | None, timeout_s: float) -> bytes: ...
    async def close(self) -> None: ...


class Engine(ABC):
    """A running engine, reached over HTTP.

    Bodies and replies are in the dialect of vLLM's HTTP server. Every method takes at most `timeout_s`. It raises
    `EngineUnreachable` if the connection fails, `EngineRefused` on a 4xx answer, `EngineFailed` on any other error
    answer, and `DeadlineExceeded`.
    """

    beside: Beside | None = None
    """None where the engine itself is asked, as its reader does."""

    def __init__(self, replica_id: str, url: str, *, has_tee: bool = False) -> None:
        """`has_tee`: the server's workers run our code, `engines/inside_vllm` or `engines/inside_sglang`."""
        self.replica_id = replica_id
        self.url = url
        self._has_tee = has_tee
        self._held: str | None = None
        """The label that was read or given last; None before, and while it changes."""
        self._committed = CHECKPOINT
        """The label of the last commit that was read or made here."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections. The engine keeps running."""

    @abstractmethod
    async def health(self, timeout_s: float) -> None:
        """Return if the engine serves, else raise."""

    @abstractmethod
    async def read(self, method: str, path: str, body: Json | bytes | None, timeout_s: float) -> bytes:
        """Call a route of the server's own, with an object or its JSON; return the answer as it was written."""

    @abstractmethod
    async def ask(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        """Call any other route of vLLM's dialect, such as /tokenize."""

    @abstractmethod
    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        """Generate for one prompt (n samples) or one conversation; `path` is /v1/completions or
        /v1/chat/completions."""

    async def reply(self, path: str, body: Json, timeout_s: float) -> bytes:
        """Generate as `generate` does; return the reply as it was written, which may be no JSON."""
        return orjson.dumps(await self.generate(path, body, timeout_s))

    @abstractmethod
    def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        """Generate as `generate` does; yield the chunks in JSON, in lists of those that came together."""

    async def weight_label(self, timeout_s: float) -> WeightLabel:
        """Return what the label of its weights tells."""
        self._held = await self._told_label(timeout_s)
        label = WeightLabel.read(self._held)
        self._committed = label.committed
        return label

    @abstractmethod
    async def open_weight_group(self, init_info: Json, timeout_s: float) -> None:
        """Join the trainer's transfer group; returns when the rendezvous is complete."""

    @abstractmethod
    async def close_weight_group(self, timeout_s: float) -> None:
        """Leave the transfer group; this releases a blocked sender."""

    @abstractmethod
    async def start_weight_update(self, timeout_s: float) -> None: ...

    @abstractmethod
    async def update_weights(self, update_info: Json, timeout_s: float) -> None:
        """Receive the announced tensors; returns when all are loaded."""

    @abstractmethod
    async def finish_weight_update(self, label: str, timeout_s: float) -> None:
        """End the update. The weights have the label, before a verdict, until `label_weights`."""

    @abstractmethod
    async def abandon_weight_update(self, timeout_s: float) -> None:
        """End an update without a commit, and its receipt, so that the next can start. The weights are of no version
        then."""

    # An engine stages where it has free memory beside its weights: a thread receives while the engine makes tokens.

    async def room_to_stage(self, num_bytes: int, timeout_s: float) -> bool:
        """Return True if tensors of so many bytes fit beside the weights."""
        if not self._has_tee:
            return False
        return _all_say("room", await self._on_workers("room_to_stage", {"num_bytes": num_bytes}, timeout_s))

    async def stage_weights(self, update_info: Json, timeout_s: float) -> None:
        """Receive the announced tensors beside the weights, after `open_receipt`; returns when all are there.

        `drop_receipt` frees them.
        """
        await self._on_workers("stage_weights", self._receive(update_info, timeout_s), timeout_s)
        await self._until_ready("staged", {}, timeout_s)

    async def load_staged(self, timeout_s: float) -> None:
        """Load the staged tensors into the weights, between start and finish of an update."""
        await self._on_workers("load_staged", {}, timeout_s)

    async def prepare_updates(
        self, tensors: Sequence[TensorMeta], config: str, tied: Sequence[Sequence[str]], timeout_s: float
    ) -> Preparation:
        """Prepare for updates of the checkpoint's tensors, before the first, which is then as fast as the next.

        With the content of its config.json, and the names of each tensor that it has more than once, received tensors
        may have other names (`checkpoint/names.py`). An engine without our code takes none of these.
        """
        if not self._has_tee:
            return Preparation()
        told = {"tensors": [*map(asdict, tensors)], "config": config, "tied": tied}
        said = await self._on_workers("plan_updates", told, timeout_s)
        return Preparation(has_tee=True, obstacle=next((one["obstacle"] for one in said if one["obstacle"]), ""))

    async def announced_as(self, update_info: Json, timeout_s: float) -> Json:
        """Return the announcement under the checkpoint's names. Raise `InvalidRequest` where it has no such tensor."""
        if not self._has_tee:
            return update_info
        first, *_ = await self._on_workers("announced_as", {"update_info": update_info}, timeout_s)
        if "refused" in first:
            raise InvalidRequest(first["refused"], param="update_info.names")
        return dict(first)

    # An engine that does not expose received tensors has no receipts: for it these calls do nothing.

    async def open_receipt(self, copy: ReceiptCopy | None, timeout_s: float) -> None:
        """Start to digest received tensors; with `copy`, also write them to a draft of the weight store."""
        if self._has_tee:
            await self._on_workers("open_receipt", asdict(copy) if copy else {}, timeout_s)

    async def close_receipt(self, timeout_s: float) -> dict[str, str]:
        """Return digests of the tensors received since `open_receipt`, by name; {} from an engine without digests.

        Equal bytes have equal digests on engines of one device. Raises `EngineFailed` if its workers differ.
        """
        if not self._has_tee:
            return {}
        first, *others = await self._on_workers("close_receipt", {}, timeout_s)
        for rank, digests in enumerate(others, 1):
            if digests != first:
                raise EngineFailed(f"workers 0 and {rank} received different bytes", replica_id=self.replica_id)
        return dict(first)

    async def keep_receipt(self, timeout_s: float) -> None:
        """Write the copy of `open_receipt` to disk, after the commit. Until then the copy stays in memory if there is
        room, so that a rollback has the GPU and the store to itself."""
        if self._has_tee:
            await self._on_workers("keep_receipt", {}, timeout_s)

    async def drop_receipt(self, timeout_s: float) -> None:
        """Discard the receipt, its draft, and weights that wait in memory for a load."""
        if self._has_tee:
            await self._on_workers("drop_receipt", {}, timeout_s)

    async def prepare_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        """Prepare for `load_snapshot` during generation, as far as the engine can.

        Returns when the snapshot is prepared. Preparation is optional: without it the load takes longer.
        """
        if self._has_tee:
            await self._until_ready("prepare_snapshot", {"path": path, "version": version}, timeout_s)

    async def load_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        """Load all weights from a checkpoint folder, also after an interrupted update. They are of no version until
        `label_weights`.

        Tokens of requests that run during the load are of no version. None may run where `loads_between_steps` of its
        description is False.
        """
        await self._label("", timeout_s)
        asked = {"path": path, "version": version}
        # Our worker in SGLang answers False for a version that it leaves to SGLang.
        if not self._has_tee or False in await self._on_workers("load_snapshot", asked, timeout_s):
            await self._load_by_itself(path, timeout_s)

    async def label_weights(self, label: str, timeout_s: float, *, is_committed: bool) -> None:
        """Label the weights. A restarted gateway believes those that are committed."""
        await self._label(label, timeout_s, is_committed=is_committed)

    async def _label(self, label: str, timeout_s: float, *, is_committed: bool = False) -> None:
        """Label the weights; `label` is "" for those that are being overwritten."""
        text = label if is_committed else open_label(label, self._committed)
        self._held = None
        await self._set_label(text, timeout_s)
        self._held = text
        if is_committed:
            self._committed = label

    @abstractmethod
    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None: ...

    @abstractmethod
    async def resume(self, timeout_s: float) -> None: ...

    @abstractmethod
    async def reset_prefix_cache(self, timeout_s: float) -> bool:
        """Forget cached prefixes; return False if running requests hold them."""

    async def wipe_kv(self, timeout_s: float) -> None:
        """Overwrite the memory of the KV cache, after `reset_prefix_cache`, and forget what the weights made of images.
        An engine without our code keeps the memory.

        Kernels multiply what they mask by 0, and 0 * NaN is NaN: NaN that a request left in a block reaches the next
        request there.
        """
        if self._has_tee:
            await self._on_workers("wipe_kv", {}, timeout_s)

    @abstractmethod
    async def load_lora_adapter(self, name: str, path: str, timeout_s: float) -> None:
        """Load the LoRA adapter in folder `path`; requests choose it with `model` = `name`."""

    @abstractmethod
    async def unload_lora_adapter(self, name: str, timeout_s: float) -> None:
        """Unload the adapter; no error if it is not loaded."""

    @abstractmethod
    async def lora_adapters(self, timeout_s: float) -> dict[str, str]:
        """Return the loaded adapters: paths by name."""

    @abstractmethod
    async def metrics(self, timeout_s: float) -> str:
        """Return the engine's Prometheus page."""

    # What each kind of server does in its own way.

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
        """Return the label of the weights."""

    @abstractmethod
    async def _set_label(self, label: str, timeout_s: float) -> None:
        """Label the weights."""

    async def _until_ready(self, method: str, arguments: Json, timeout_s: float) -> None:
        """Poll the workers until all are ready: a call that waits there would block the engine's steps."""
        began, (shortest_s, longest_s) = time.monotonic(), _LOOKS_S
        while not _all_say("ready", await self._on_workers(method, arguments, timeout_s)):
            waited_s = time.monotonic() - began
            await asyncio.sleep(min(max(shortest_s, waited_s * _LATE), longest_s))


def _all_say(word: str, workers: Sequence[Any]) -> bool:
    """Return True if all workers answer yes: SGLang's with True, vLLM's with it under `word`."""
    return all(answer[word] if isinstance(answer, dict) else answer for answer in workers)
