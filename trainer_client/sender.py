"""Weights from a trainer's own tensors to all replicas at once, over gloo or NCCL. Needs no TRL.

The group is opened with the first push, and anew after a failure or when a replica has left it.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal
from urllib.parse import urlsplit

import torch

from engines.errors import ConfigError, InvalidRequest, WeightUpdateConflict, WeightUpdateFailed
from engines.gloo_transfer import NamedTensor, address_towards
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.channels import Channel, GlooChannel, NcclChannel
from trainer_client.progress import OnWeightProgress, WeightProgress

Backend = Literal["gloo", "nccl"]


def named_tensors(model: torch.nn.Module) -> Iterator[NamedTensor]:
    """The parameters of `model` by their names, which must be those of the checkpoint. Tied ones come once."""
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


class GroupSender:
    """Sends versions of the policy through one group of the trainer and all workers of all replicas.

    `backend` is what the engines say they receive over, unless named. `dtype` is what tensors are sent in, their own
    unless given: the engines' saves half the bytes of a float32 trainer. `device` is the trainer's GPU for NCCL. `port`
    is where engines find the trainer, a free one unless given. `timeout_s` bounds each wait: for the group, for
    rollouts in flight, for the tensors, for the commit.
    """

    def __init__(
        self,
        client: BlockingRolloutClient,
        *,
        backend: Backend | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        port: int = 0,
        timeout_s: float = 300.0,
        on_progress: OnWeightProgress | None = None,
    ) -> None:
        if backend not in (None, "gloo", "nccl"):
            raise ConfigError(f"backend = {backend!r} is neither 'gloo' nor 'nccl'")
        self._client = client
        self._backend = backend
        self._dtype = dtype
        self._device = torch.device(device) if device is not None else None
        self._port = port
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._channel: Channel | None = None

    def __enter__(self) -> "GroupSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def push(
        self,
        named_tensors: Iterable[NamedTensor],
        version: int | None = None,
        *,
        canary_logprobs: Sequence[float] | None = None,
    ) -> int:
        """Have every replica serve these tensors. Returns their version, which is the next one.

        `version` is refused with `WeightUpdateConflict` where it is not that. Tensors that are left out stay as they
        are. `canary_logprobs` are the trainer's own of the client's `canary_token_ids`, all but the first.

        Raises the gateway's own error: `InvalidRequest` where names or shapes are not the model's, `WeightUpdateFailed`
        with the replica's name, `DeadlineExceeded`. The group is closed then, and another push may be tried.
        """
        tensors = list(named_tensors)
        if not tensors:
            raise InvalidRequest("named_tensors is empty: an update needs at least one tensor", param="named_tensors")
        self._check_version(version)
        try:
            channel = self._start()
            update_info = self._announced(tensors)
            self._beside(
                channel,
                lambda: self._client.update_weights(update_info, self._timeout_s),
                lambda: channel.send(self._sent(tensors)),
            )
            return self._client.finish_weight_update(canary_logprobs, self._timeout_s)
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise

    def close(self, reason: str = "the trainer closed the group") -> None:
        """Leave the group. May be called twice; the next push opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(reason)

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
                    f"the engines behind {self._client.url} receive weights over {other!r}, which GroupSender does not "
                    "speak: start them with gloo or nccl"
                )

    def _check_version(self, version: int | None) -> None:
        if version is None:
            return
        served = self._client.weight_version()
        if version != served + 1:
            raise WeightUpdateConflict(
                f"version = {version} is to be pushed, but {self._client.url} serves {served}: the next is {served + 1}"
            )

    def _announced(self, tensors: Sequence[NamedTensor]) -> dict[str, object]:
        return {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(self._dtype or tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }

    def _sent(self, tensors: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
        """Each in the dtype announced, made when its turn comes; tells how far it is."""
        total = sum(tensor.numel() * (self._dtype or tensor.dtype).itemsize for _, tensor in tensors)
        sent = 0
        for count, (name, tensor) in enumerate(tensors, start=1):
            cast = tensor.detach().to(self._dtype or tensor.dtype)
            yield name, cast
            sent += cast.nbytes
            if self._on_progress is not None:
                self._on_progress(WeightProgress(tensors=count, num_tensors=len(tensors), bytes=sent, num_bytes=total))

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
