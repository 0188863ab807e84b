"""What the gateway may ask of a running engine. One class per kind of server; all speak vLLM's dialect upwards."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from engines.types import PauseMode

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptCopy:
    """Where an engine writes what it receives: folder `draft` of the weight store, for `model`.

    Of `names`, what never comes is taken from the folder `base`. The transfer waits for the disk `wait_s` at most.
    """

    draft: str
    model: str
    base: str
    names: tuple[str, ...]
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where an engine fetches versions that are not on its machine: the gateway's URL, and a key that opens them."""

    url: str
    key: str = field(default="", repr=False)


class Engine(ABC):
    """A running engine, reached over HTTP.

    Bodies and replies are those of vLLM's HTTP server (facts of the pinned version), whatever the engine speaks itself.
    Every method is bounded by `timeout_s` and raises `EngineUnreachable` when the connection fails, breaks or stays
    silent, `EngineRefused` on a 4xx answer and `EngineFailed` on any other answer that is not a success.
    """

    replica_id: str
    url: str
    tells_version = True
    """False where `weight_version` has found that the engine cannot say."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections. The engine itself goes on."""

    @abstractmethod
    async def health(self, timeout_s: float) -> None:
        """Return when the engine serves; raise when it does not."""

    @abstractmethod
    async def ask(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        """Any other route of vLLM's dialect that the gateway passes through, such as /tokenize."""

    @abstractmethod
    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        """One prompt (n samples) or one conversation; `path` is /v1/completions or /v1/chat/completions."""

    @abstractmethod
    def stream(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
        """The same, chunk by chunk as the engine sends them."""

    @abstractmethod
    async def weight_version(self, timeout_s: float) -> int | None:
        """The version the engine says it holds: 0 for the checkpoint, and for one that cannot say; None where an update
        broke off, so that its weights are a mixture."""

    @abstractmethod
    async def open_weight_group(self, init_info: Json, timeout_s: float) -> None:
        """Join the trainer's transfer group; returns when the rendezvous is complete."""

    @abstractmethod
    async def close_weight_group(self, timeout_s: float) -> None:
        """Leave the transfer group, so that a sender blocked on it is let go."""

    @abstractmethod
    async def start_weight_update(self, timeout_s: float) -> None: ...

    @abstractmethod
    async def update_weights(self, update_info: Json, timeout_s: float) -> None:
        """Receive the tensors announced; returns when all are loaded."""

    @abstractmethod
    async def finish_weight_update(self, version: int, timeout_s: float) -> None:
        """End the update; from here on the engine says it holds `version`."""

    @abstractmethod
    async def abandon_weight_update(self, timeout_s: float) -> None:
        """End an update without a commit, so that the next one can start. The weights are a mixture then."""

    async def plan_updates(self, timeout_s: float) -> str:
        """Prepare for updates, before the first. Returns why each will be a reload by the engine itself, which takes
        longer; "" where it is loaded in place, and from an engine that does not say."""
        return ""

    @abstractmethod
    async def open_receipt(self, copy: ReceiptCopy | None, timeout_s: float) -> None:
        """Digest all tensors received from now on; with `copy`, write them into a draft of the weight store too."""

    @abstractmethod
    async def close_receipt(self, timeout_s: float) -> dict[str, str]:
        """Digests of the tensors received since `open_receipt`, by name; {} from an engine that cannot tell.

        Equal bytes have equal digests on engines of one device. Raises `EngineFailed` where its workers differ.
        """

    @abstractmethod
    async def keep_receipt(self, timeout_s: float) -> None:
        """Have the copy that `open_receipt` asked for written down: the update is committed. Until then it waits in
        memory, where there is room, so that a replica that goes back instead has its GPU and the store for itself."""

    @abstractmethod
    async def drop_receipt(self, timeout_s: float) -> None:
        """Forget the receipt; its draft is worth nothing."""

    @abstractmethod
    async def prepare_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        """Bring what `load_snapshot` will be asked for as near as is possible while tokens are made.

        Returns once it is there. An engine that cannot, or that fails here, loads as well, and takes longer for it.
        """

    @abstractmethod
    async def load_snapshot(self, path: str, version: int, timeout_s: float) -> None:
        """Load all weights from a checkpoint folder, also after an update that broke off; it then holds `version`.

        No request may run in the engine meanwhile.
        """

    @abstractmethod
    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None: ...

    @abstractmethod
    async def resume(self, timeout_s: float) -> None: ...

    @abstractmethod
    async def reset_prefix_cache(self, timeout_s: float) -> bool:
        """Forget cached prefixes; False when running requests hold them."""

    @abstractmethod
    async def load_lora_adapter(self, name: str, path: str, timeout_s: float) -> None:
        """Take the LoRA adapter in folder `path`; from here on requests choose it with `model` = `name`."""

    @abstractmethod
    async def unload_lora_adapter(self, name: str, timeout_s: float) -> None:
        """Know the adapter no longer. One that it does not know is no error."""

    @abstractmethod
    async def lora_adapters(self, timeout_s: float) -> dict[str, str]:
        """The adapters it knows: path by name."""

    @abstractmethod
    async def metrics(self, timeout_s: float) -> str:
        """The engine's own Prometheus page."""
