"""The checkpoint engine in each of verl's training workers: sends weights to the gateway."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from engines.errors import ConfigError, StoreFailed
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.transports.sender import TransportName, WeightSender
from trainer_client.verl.settings import Settings

NamedTensor = tuple[str, torch.Tensor]

WEIGHT_VERSION = "gateway/weight_version"
"""The metric with the version of a sync."""


@CheckpointEngineRegistry.register("gateway")
class GatewayCheckpointEngine(CheckpointEngine):
    """The first worker sends; the others help to gather each tensor.

    Tensors are sent as they are gathered, at most 1 GiB ahead.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self._is_master = is_master
        self._settings = Settings(**settings)
        self._client: BlockingRolloutClient | None = None
        self._sender: WeightSender | None = None
        self._version_of_step_0: int | None = None

    async def send_weights(self, weights: Iterator[NamedTensor], global_steps: int | None = None) -> dict[str, Any]:
        """Let every replica serve these weights. Return metrics, on the first worker.

        Raises the gateway's error. Even then every worker gathers all tensors, since a worker that stopped would block
        the others in a collective.
        """
        try:
            return self._push(weights, global_steps or 0) if self._is_master else {}
        finally:
            for _ in weights:
                pass

    def close(self) -> None:
        """Leave the group, if any, and drop the connections. May be called twice."""
        if self._sender is not None:
            self._sender.close()
        if self._client is not None:
            self._client.close()
        self._client = self._sender = None

    def _push(self, weights: Iterator[NamedTensor], global_steps: int) -> dict[str, Any]:
        began = time.perf_counter()
        if self._client is None or self._sender is None:
            self._client = self._client or BlockingRolloutClient(self._settings.url)
            self._sender = self._opened(self._client)
        # The first version is the gateway's next; then versions and verl's steps count together, so that a version
        # gives its step. Another trainer's update in between is a conflict, never a wrong step.
        wanted = None if self._version_of_step_0 is None else self._version_of_step_0 + global_steps
        version = self._sender.push(weights, wanted)
        self._version_of_step_0 = version - global_steps
        return {WEIGHT_VERSION: version, "gateway/sync_s": time.perf_counter() - began}

    def _opened(self, client: BlockingRolloutClient) -> WeightSender:
        settings = self._settings
        transport: TransportName | None = settings.transport if settings.transport != "auto" else None
        if transport is None and self._sees_store(client):
            transport = "store"
        return WeightSender(
            client,
            transport=transport,
            folder=settings.store_folder,
            timeout_s=settings.sync_timeout_s,
        )

    def _sees_store(self, client: BlockingRolloutClient) -> bool:
        if self._settings.store_folder is not None:
            return True
        try:
            return Path(client.call("GET", "/v1/weight_store")["folder"]).is_dir()
        except StoreFailed:
            return False  # the gateway has no store

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Stand in for what verl's own engines need to find each other, and to receive."""
        raise ConfigError("checkpoint_engine.backend=gateway goes with trainer.v1.trainer_mode=gateway alone: set that")

    prepare = build_topology = init_process_group = receive_weights = finalize = _refuse
