"""Weight sync for trainers of TRL up to 1.10. The gateway needs `gateway.trl_legacy: true`.

Call `install()` before the trainer is made. TRL's own client generates.
"""

import atexit
import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from trainer_client.blocking import BlockingRolloutClient
from trainer_client.transports.sender import WeightSender


def install(transport: Literal["store", "gloo", "nccl"] | None = None, timeout_s: float = 300.0) -> None:
    """Make TRL's trainers use `LegacyVLLMClient`. The arguments are those of `WeightSender`."""
    vllm_generation.VLLMClient = functools.partial(LegacyVLLMClient, transport=transport, timeout_s=timeout_s)


class LegacyVLLMClient(VLLMClient):
    """TRL's client. A reset of the prefix cache sends its tensors to all replicas as one version.

    TRL sends tensors one by one without an end mark; the reset follows the last. Until then tensors are copied to host
    memory, since TRL gathers and merges some of them only temporarily.
    """

    weight_version: int | None = None
    """The version of the last sync."""

    def __init__(self, *args: Any, transport: Any = None, timeout_s: float = 300.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transport = transport
        self._timeout_s = timeout_s
        self._held: dict[str, torch.Tensor] = {}
        self._gateway: BlockingRolloutClient | None = None
        self._sender: WeightSender | None = None
        self._device: torch.device | None = None

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Open the sender. `device` is the trainer's, for NCCL."""
        self.close_communicator()
        self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self._gateway = BlockingRolloutClient(self.base_url)
        self._sender = WeightSender(
            self._gateway,
            transport=self._transport,
            device=self._device if self._device.type == "cuda" else None,
            timeout_s=self._timeout_s,
        )
        atexit.register(self.close_communicator)

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        self._held[name] = weights.detach().to("cpu", copy=True)

    def reset_prefix_cache(self) -> None:
        """Push the tensors since the last reset. Raises the gateway's error; the version before then stays served."""
        if self._held:
            if self._sender is None:
                raise RuntimeError("init_communicator was not called")
            self.weight_version = self._sender.push(self._on_device(self._held))
            self._held = {}  # kept where the push failed, for the next
        super().reset_prefix_cache()

    def close_communicator(self) -> None:
        sender, gateway = self._sender, self._gateway
        self._sender = self._gateway = None
        if sender is not None:
            sender.close()
        if gateway is not None:
            gateway.close()

    def _on_device(self, held: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in held.items():
            yield name, tensor.to(self._device or "cpu")
