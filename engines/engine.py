"""The interface of a running engine. Each kind of server has a class, which speaks vLLM's dialect to the gateway."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from engines.chunks import Chunk
from engines.errors import InvalidRequest, WeightUpdateConflict
from engines.types import PauseMode, TensorMeta
from engines.weight_label import WeightLabel

Json = dict[str, Any]
Take = Callable[[list[Chunk]], None]
"""Takes the chunks of a reply that came together."""


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

    replica_id: str
    url: str
    beside: Beside | None = None
    """None where the engine itself is asked, as its reader does."""

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

    @abstractmethod
    async def weight_label(self, timeout_s: float) -> WeightLabel:
        """Return what the label of its weights tells; `UNKNOWN` where it has no labels."""

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
        return False

    async def stage_weights(self, update_info: Json, timeout_s: float) -> None:
        """Receive the announced tensors beside the weights, after `open_receipt`; returns when all are there.

        `drop_receipt` frees them.
        """
        raise WeightUpdateConflict(f"replica {self.replica_id} cannot stage weights")

    async def load_staged(self, timeout_s: float) -> None:
        """Load the staged tensors into the weights, between start and finish of an update."""
        raise WeightUpdateConflict(f"replica {self.replica_id} cannot stage weights")

    async def prepare_updates(
        self, tensors: Sequence[TensorMeta], config: str, tied: Sequence[Sequence[str]], timeout_s: float
    ) -> Preparation:
        """Prepare for updates of the checkpoint's tensors, before the first, which is then as fast as the next.

        With the content of its config.json, and the names of each tensor that it has more than once, received tensors
        may have other names (`checkpoint/names.py`). An engine without our code takes none of these.
        """
        return Preparation()

    async def announced_as(self, update_info: Json, timeout_s: float) -> Json:
        """Return the announcement under the checkpoint's names. Raise `InvalidRequest` where it has no such tensor."""
        return update_info

    # An engine that does not expose received tensors has no receipts: for it these calls do nothing.

    async def open_receipt(self, copy: ReceiptCopy | None, timeout_s: float) -> None:
        """Start to digest received tensors; with `copy`, also write them to a draft of the weight store."""

    async def close_receipt(self, timeout_s: float) -> dict[str, str]:
        """Return digests of the tensors received since `open_receipt`, by name; {} from an engine without digests.

        Equal bytes have equal digests on engines of one device. Raises `EngineFailed` if its workers differ.
        """
        return {}

    async def keep_receipt(self, timeout_s: float) -> None:
        """Write the copy of `open_receipt` to disk, after the commit. Until then the copy stays in memory if there is
        room, so that a rollback has the GPU and the store to itself."""

    async def drop_receipt(self, timeout_s: float) -> None:
        """Discard the receipt, its draft, and weights that wait in memory for a load."""

    async def prepare_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        """Prepare for `load_snapshot` during generation, as far as the engine can.

        Returns when the snapshot is prepared. Preparation is optional: without it the load takes longer.
        """

    @abstractmethod
    async def load_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        """Load all weights from a checkpoint folder, also after an interrupted update. They are of no version until
        `label_weights`.

        Tokens of requests that run during the load are of no version. None may run where `loads_between_steps` of its
        description is False.
        """

    @abstractmethod
    async def label_weights(self, label: str, timeout_s: float, *, is_committed: bool) -> None:
        """Label the weights, where the engine knows labels. A restarted gateway believes those that are committed."""

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
