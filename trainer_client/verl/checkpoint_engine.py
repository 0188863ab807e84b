"""verl's way of weights to the gateway: a checkpoint engine, of which every training worker has one."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from engines.errors import ConfigError, StoreFailed
from engines.types import PauseMode
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.client import KEY_VARIABLE
from trainer_client.sender import GroupSender
from trainer_client.verl.settings import Settings
from trainer_client.weights import WeightSender

NamedTensor = tuple[str, torch.Tensor]

WEIGHT_VERSION = "gateway/weight_version"
"""The metric that tells the version which a sync made."""


@CheckpointEngineRegistry.register("gateway")
class GatewayCheckpointEngine(CheckpointEngine):
    """The first worker sends; the others take part in gathering each tensor.

    Tensors go as they are gathered, one after the other, so the store needs no more memory for them than a shard's;
    a group announces them first, and holds a version whole.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self._is_master = is_master
        self._settings = Settings(**settings)
        self._client: BlockingRolloutClient | None = None
        self._sender: WeightSender | GroupSender | None = None
        self._version_of_step_0: int | None = None

    async def send_weights(self, weights: Iterator[NamedTensor], global_steps: int | None = None) -> dict[str, Any]:
        """Have every replica serve these weights. Returns metrics, on the first worker.

        Raises the gateway's own error; every worker has then gathered all tensors all the same, since one that stopped
        would leave the others waiting in a collective.
        """
        try:
            return self._push(weights, global_steps or 0) if self._is_master else {}
        finally:
            for _ in weights:
                pass

    def close(self) -> None:
        """Leave the group, where there is one, and drop the connections. May be called twice."""
        if isinstance(self._sender, GroupSender):
            self._sender.close()
        if self._client is not None:
            self._client.close()
        self._client = self._sender = None

    def _push(self, weights: Iterator[NamedTensor], global_steps: int) -> dict[str, Any]:
        began = time.perf_counter()
        if self._client is None or self._sender is None:
            self._client = BlockingRolloutClient(self._settings.url)
            self._sender = self._opened(self._client)
        # The first version is whichever is next at the gateway; from then on versions count as verl's steps do, so that
        # a version tells its step. Somebody else's update in between is a conflict, never a wrong step.
        wanted = None if self._version_of_step_0 is None else self._version_of_step_0 + global_steps
        passing = _Passing(self._client, self._settings)
        try:
            version = self._sender.push(passing.each(weights), wanted)
        finally:
            passing.resume()
        self._version_of_step_0 = version - global_steps
        return {
            WEIGHT_VERSION: version,
            "gateway/sync_s": time.perf_counter() - began,
            "gateway/sync_bytes": passing.num_bytes,
        }

    def _opened(self, client: BlockingRolloutClient) -> WeightSender | GroupSender:
        settings = self._settings
        if settings.transport == "store" or (settings.transport == "auto" and self._sees_store(client)):
            return WeightSender(
                settings.url,
                api_key=os.environ.get(KEY_VARIABLE, ""),
                folder=settings.store_folder,
                timeout_s=settings.sync_timeout_s,
            )
        return GroupSender(
            client,
            backend=None if settings.transport == "auto" else settings.transport,
            device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None,
            timeout_s=settings.sync_timeout_s,
        )

    def _sees_store(self, client: BlockingRolloutClient) -> bool:
        if self._settings.store_folder is not None:
            return True
        try:
            return Path(client.weight_store()["folder"]).is_dir()
        except StoreFailed:
            return False  # the gateway keeps none

    # The rest is for engines on verl's own workers, of which a gateway's trainer has none.

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        raise ConfigError(_NO_RECEIVERS)

    def init_process_group(self, **_: Any) -> None:
        raise ConfigError(_NO_RECEIVERS)

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        raise ConfigError(_NO_RECEIVERS)

    def finalize(self) -> None:
        pass


_NO_RECEIVERS = (
    "checkpoint_engine.backend=gateway has no receivers among verl's workers: it goes with "
    "trainer.v1.trainer_mode=gateway, and the gateway brings the weights to its engines"
)


class _Passing:
    """A version's tensors on their way to the sender, which takes the last one before it tells the gateway.

    That is the moment to stop the completions under way: gathering and writing went on beside them.
    """

    def __init__(self, client: BlockingRolloutClient, settings: Settings) -> None:
        self.num_bytes = 0
        self._client = client
        self._settings = settings
        self._paused = False

    def each(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """In the dtype that engines serve: half the bytes of a float32 trainer. Integers stay as they are."""
        dtype = getattr(torch, self._settings.dtype) if self._settings.dtype else None
        for name, tensor in tensors:
            if name in self._settings.left_out:
                continue
            sent = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            self.num_bytes += sent.nbytes
            yield name, sent
        if self._settings.pause_mode is not PauseMode.WAIT:
            self._paused = True
            self._client.pause(self._settings.pause_mode)

    def resume(self) -> None:
        if self._paused:
            self._client.resume()
