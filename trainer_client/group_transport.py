"""A version goes through one process group of the trainer and all workers of all replicas, over gloo or NCCL.

The group is opened with the first push, and anew after a failure or when a replica has left it.
"""

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal
from urllib.parse import urlsplit

import torch

from engines.errors import ConfigError, WeightUpdateConflict, WeightUpdateFailed
from engines.gloo_transfer import address_towards
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.channels import Channel, GlooChannel, NcclChannel
from trainer_client.tensors import Part

Backend = Literal["gloo", "nccl"]


class GroupTransport:
    """`backend` is what the engines say they receive over, unless named. `device` is the trainer's GPU for NCCL. `port`
    is where engines find the trainer, a free one where it is 0."""

    def __init__(
        self,
        client: BlockingRolloutClient,
        timeout_s: float,
        *,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        port: int = 0,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._backend = backend
        self._device = torch.device(device) if device is not None else None
        self._port = port
        self._channel: Channel | None = None

    def push(
        self,
        parts: Iterable[Part],
        version: int | None,
        canary_logprobs: Sequence[float] | None,
        rolling: bool | None,
    ) -> int:
        """Send part after part in one update. `version` is refused where it is not the next one."""
        if rolling:
            raise ConfigError(
                "rolling = True: the replicas of a group receive together; a version goes to one after the other with "
                "WeightSender(transport='store')"
            )
        self._check_version(version)
        try:
            channel = self._start()
            for part in parts:
                self._send(channel, part)
            return self._client.finish_weight_update(canary_logprobs, self._timeout_s)
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise

    def close(self, reason: str = "the trainer closed the group") -> None:
        """Leave the group. May be called twice; the next push opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(reason)

    def _send(self, channel: Channel, part: Part) -> None:
        self._beside(
            channel,
            lambda: self._client.update_weights(part.announced, self._timeout_s),
            lambda: channel.send(iter(part.tensors)),
        )

    def _start(self) -> Channel:
        """Open the update, in a new group where there is none. Nothing is touched when a start is refused, so that one
        which meets a group that a replica has left may follow again."""
        if self._channel is not None:
            try:
                self._client.start_weight_update(self._timeout_s)
                return self._channel
            except WeightUpdateFailed:
                self.close("a replica left the group")
        self._channel = channel = self._open()
        self._client.start_weight_update(self._timeout_s)
        return channel

    def _open(self) -> Channel:
        world_size = self._client.world_size(self._timeout_s) + 1
        server = urlsplit(self._client.url)
        address = address_towards(server.hostname or "", server.port or 80)
        port = self._port or _free_port()
        channel: Channel
        if self._receives_over() == "gloo":
            channel = GlooChannel(address, port, world_size, self._timeout_s)
        else:
            device = self._device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
            channel = NcclChannel(address, port, world_size, self._timeout_s, device)
        init_info = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
        }
        try:
            self._beside(channel, lambda: self._client.init_weight_transfer(init_info, self._timeout_s), channel.join)
        except BaseException:
            channel.close("the group did not come about")
            raise
        return channel

    def _receives_over(self) -> Backend:
        if self._backend is not None:
            return self._backend
        told = self._client.server_info()["vllm_config"]["weight_transfer_config"]
        match (told or {}).get("backend"):
            case "gloo":
                return "gloo"
            case "nccl":
                return "nccl"
            case other:
                raise ConfigError(
                    f"the engines behind {self._client.url} receive weights over {other!r}, which WeightSender does "
                    "not speak: start them with gloo or nccl, or say transport='store'"
                )

    def _check_version(self, version: int | None) -> None:
        if version is None:
            return
        served = self._client.weight_version()
        if version != served + 1:
            raise WeightUpdateConflict(
                f"version = {version} is to be pushed, but {self._client.url} serves {served}: the next is {served + 1}"
            )

    def _beside(self, channel: Channel, call: Callable[[], None], collective: Callable[[], None]) -> None:
        """A call to the gateway while the trainer takes part in what it is for. Whichever fails ends the other."""

        def answered() -> None:
            try:
                call()
            except BaseException as error:
                channel.give_up(str(error))
                raise

        with ThreadPoolExecutor(max_workers=1) as beside:
            answer = beside.submit(answered)
            try:
                collective()
            except WeightUpdateFailed as error:
                # The gateway's own error says which replica it was; ours only that the group broke.
                channel.close(str(error))
                answer.result()
                raise
            except BaseException as error:
                channel.close(f"{type(error).__name__}: {error}")
                raise
            answer.result()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
