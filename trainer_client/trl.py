"""Weight sync of TRL's trainers without CUDA: TRL's client with gloo instead of NCCL.

Call `install()` before the trainer is made; with CUDA it does nothing. engines/transfer/gloo.py moves the tensors.
"""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient

from engines.transfer.gloo import TIMEOUT_S, WeightGroup, address_towards, group_info
from engines.transfer.packing import NamedTensor

_COLLECTIVES = ("/init_weight_transfer_engine", "/update_weights")


def install(timeout_s: float = TIMEOUT_S) -> None:
    """Make TRL's trainers use `GlooVLLMClient`, unless CUDA is available. `timeout_s` limits each wait for a group."""
    if torch.cuda.is_available():
        return
    vllm_generation.VLLMClient = functools.partial(GlooVLLMClient, timeout_s=timeout_s)
    vllm_client.packed_nccl_broadcast_producer = send_packed


def send_packed(
    iterator: Iterator[NamedTensor],
    group: WeightGroup,
    src: int,
    post_iter_func: Callable[[NamedTensor], torch.Tensor],
) -> None:
    """Send over gloo in place of vLLM's `packed_nccl_broadcast_producer`; the trainer is `src`, which is 0."""
    try:
        group.send((named[0], post_iter_func(named)) for named in iterator)
    except BaseException as error:  # which TRL raises after the engines' answer
        group.close(f"the trainer failed: {type(error).__name__}: {error}")
        raise


class Endpoint(WeightGroup):
    """The trainer's end of a group. TRL closes it by `endpoint.group.store = None`."""

    @property
    def group(self) -> "Endpoint":
        return self

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("store", "socket"):
            self.close()
        else:
            super().__setattr__(name, value)


class GlooVLLMClient(VLLMClient):
    """TRL's client over gloo. A failed weight call ends the broadcast beside it, with the server's reason."""

    communicator: Endpoint | None
    weight_version: int | None = None
    """The version of the last update; None from a plain vLLM, which does not report it."""

    def __init__(self, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Join the engines in a gloo group. Weights are copied from `device`."""
        if self.get_server_info()["weight_transfer_config"] is None:
            raise RuntimeError(f"{self.base_url} has no weight transfer: start its engines with the gloo backend")
        server = urlsplit(self.base_url)
        address = address_towards(server.hostname or "", server.port or 80)
        world_size = self.get_world_size() + 1
        info = group_info(address, self.group_port, world_size)
        self.close_communicator()
        self.communicator = group = Endpoint(address, self.group_port, 0, world_size, self._timeout_s)
        group.listen()
        with ThreadPoolExecutor(max_workers=1) as beside:
            answer = beside.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
            group.join()
            answer.result()

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        route = url.removeprefix(self.base_url)
        try:
            reply: dict[str, Any] = super()._post(url, **kwargs)
        except Exception as error:  # TRL raises no narrower one
            if route in _COLLECTIVES and self.communicator is not None:
                self.communicator.give_up(f"{route} failed: {error}")
            raise
        self.weight_version = reply.get("weight_version", self.weight_version)
        return reply
