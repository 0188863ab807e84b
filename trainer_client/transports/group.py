"""The group transport: one process group of the trainer and all workers of all replicas, over gloo or NCCL.

The group is opened by the first push, and opened again after a failure or a replica's departure.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

import torch

from engines.errors import ConfigError, DeadlineExceeded, RolloutGatewayError, WeightUpdateFailed
from engines.transfer.gloo import SENDER_RANK, WeightGroup, address_towards, group_info
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.http import Json
from trainer_client.transports.channels import Channel, NcclChannel
from trainer_client.transports.tensors import Part

Backend = Literal["gloo", "nccl"]

_GIVE_UP_S = 10.0
"""Limit on the call that ends an update with its reason. Without it the update ends by its silence."""
_LEAVE_S = 5.0
"""Time of a collective to end once its channel is closed."""


class GroupTransport:
    """Sends weights over a process group.

    backend: default: the engines'.
    device: the trainer's GPU for NCCL.
    address, port: the trainer's listener for the engines; default: its address towards the gateway, and a free port.
    """

    def __init__(
        self,
        client: BlockingRolloutClient,
        timeout_s: float,
        *,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        address: str = "",
        port: int = 0,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._backend = backend
        self._device = torch.device(device) if device is not None else None
        self._address = address
        self._port = port
        self._channel: Channel | None = None
        self._place = ""

    def push(self, parts: Iterable[Part], terms: Json, canary: Json) -> int:
        """Send all parts in one update."""
        try:
            channel = self._start(terms)
            for part in parts:
                announce = partial(self._call, "POST", "/update_weights", {"update_info": part.announced})
                self._beside(channel, announce, partial(channel.send, part.tensors))
            reply = self._call("POST", "/finish_weight_update", canary)
            if "weight_version" not in reply:
                raise RolloutGatewayError(
                    f"{self._client.url} answered without weight_version: is it a rollout gateway?"
                )
            return int(reply["weight_version"])
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise

    def _call(self, method: str, path: str, body: Json, timeout_s: float | None = None) -> Json:
        """Make a call of this group's, which is refused where another trainer has opened one since."""
        return self._client.call(method, path, {**body, "group": self._place}, timeout_s or self._timeout_s)

    def close(self, reason: str = "the trainer closed the group") -> None:
        """Leave the group. May be called twice; the next push opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(reason)

    def _give_up(self, reason: str) -> None:
        """Leave the group, and let the gateway end the update if it is still open."""
        had_group = self._channel is not None
        self.close(reason)
        if had_group:
            # The trainer needs the first error; an unreachable gateway ends the update by itself.
            with contextlib.suppress(RolloutGatewayError):
                self._call("DELETE", "/v1/weight_updates", {"reason": reason}, _GIVE_UP_S)

    def _start(self, terms: Json) -> Channel:
        """Open the update, in a new group if there is none. A refused start changes nothing, so that it can be retried
        in a new group after a replica has left or joined, or the gateway was restarted."""
        start = partial(self._call, "POST", "/start_weight_update", terms)
        if self._channel is not None:
            try:
                start()
                return self._channel
            except WeightUpdateFailed:
                self.close("the group is over")
        self._channel = channel = self._open()
        start()
        return channel

    def _open(self) -> Channel:
        reply = self._client.call("GET", "/get_world_size", timeout_s=self._timeout_s)
        world_size = int(reply["world_size"]) + 1
        server = urlsplit(self._client.url)
        address = self._address or address_towards(server.hostname or "", server.port or 80)
        port = _free_port(self._port)
        if self._receives_over() == "gloo":
            channel: Channel = WeightGroup(address, port, SENDER_RANK, world_size, self._timeout_s)
        else:
            device = self._gpu()
            channel = NcclChannel(address, port, world_size, device)
            self._check_gpu_is_free(device)
        self._place = f"{address}:{port}"
        info = group_info(address, port, world_size)
        try:
            channel.listen()
            route = "/init_weight_transfer_engine"
            init = partial(self._client.call, "POST", route, {"init_info": info}, self._timeout_s)
            self._beside(channel, init, channel.join)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"not all engines joined the trainer at {self._place} within {self._timeout_s:g} s; give "
                f"WeightSender an address and a port that they can reach ({error})"
            ) from error
        return channel

    def _gpu(self) -> torch.device:
        """Return the trainer's GPU with its number, which is that of this thread where none is given."""
        device = self._device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def _check_gpu_is_free(self, device: torch.device) -> None:
        """Raise `ConfigError` if a replica runs on the trainer's GPU: NCCL takes one rank per GPU."""
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        if there := [one["replica_id"] for one in self._client.served_weights().replicas if gpu in one["gpus"]]:
            raise ConfigError(
                f"device = {str(device)!r} is {gpu}, also used by replica {there[0]}, and NCCL needs a GPU per rank: "
                "give the trainer its own GPU (start the gateway with the others in CUDA_VISIBLE_DEVICES), or use "
                "transport='store'"
            )

    def _receives_over(self) -> Backend:
        if self._backend is not None:
            return self._backend
        info = self._client.call("GET", "/server_info?config_format=json")
        reported = info["vllm_config"]["weight_transfer_config"]
        backend = (reported or {}).get("backend")
        if backend not in get_args(Backend):
            raise ConfigError(
                f"the engines behind {self._client.url} receive weights over {backend!r}, which WeightSender does "
                "not support: start them with gloo or nccl, or use transport='store'"
            )
        # Not asked again: after each death of a replica a vLLM that is new would take seconds for its first answer.
        self._backend = cast(Backend, backend)
        return self._backend

    def _beside(self, channel: Channel, call: Callable[[], object], collective: Callable[[], None]) -> None:
        """Call the gateway, and take part in the collective on another thread. The failure of either ends the other.

        Where the group broke, the gateway's error is raised: it names the replica.
        """
        failed: list[BaseException] = []

        def take_part() -> None:
            try:
                collective()
            except BaseException as error:
                failed.append(error)
                channel.close(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=take_part, name="weights", daemon=True)
        thread.start()
        try:
            call()
            thread.join(self._timeout_s)
            if thread.is_alive():
                raise WeightUpdateFailed(f"waited {self._timeout_s:g} s for all ranks to take part")
        except BaseException as error:
            first = failed[:1]
            channel.close(f"{type(error).__name__}: {error}")
            if first and isinstance(error, Exception):
                if not isinstance(first[0], WeightUpdateFailed):
                    raise first[0] from error  # the trainer's own
                error.add_note(f"The trainer: {first[0]}")
            thread.join(_LEAVE_S)
            raise
        if failed:
            raise failed[0]


def _free_port(port: int) -> int:
    """Return `port`, or a free one for 0; raise `ConfigError` if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the group's own listener does
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"port = {port}: the trainer cannot listen there ({error.strerror}); give WeightSender a free "
                "port, or none"
            ) from error
        return int(probe.getsockname()[1])
