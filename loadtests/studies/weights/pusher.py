"""A trainer process that only pushes weights with the served model's names, shapes and dtypes."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from engines.errors import RolloutGatewayError, WeightUpdateFailed
from engines.process.port import free_port
from loadtests.own_process import OwnProcess
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client.transports.sender import TransportName

if TYPE_CHECKING:
    import torch
Way = TransportName | Literal["trl"]
"""A transport of `WeightSender`, or TRL's unmodified client."""

_READY_S = 300.0
_NO_LOGPROB = -1000.0


class Flaw(StrEnum):
    """The reason why a push is refused."""

    NONE = "none"
    LOGPROBS = "canary"
    """The trainer's canary log-probs change, its weights do not: the canary refuses on all replicas."""
    HALF = "half sent"
    """The trainer gives up after a part of its tensors."""
    NAN = "NaN"
    """A tensor of the trainer's is NaN: the canary refuses on all replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """One push as seen by its trainer; `error` is empty on success."""

    seconds: float
    version: int
    error: str


class Pusher(OwnProcess):
    """Pushes on request. `device` is that of `WeightSender`. A push raises `EOFError` if the process is killed."""

    def __init__(self, url: str, transport: Way, device: str, timeout_s: float) -> None:
        super().__init__(_serve, url, transport, device, timeout_s)
        self._timeout_s = timeout_s
        self._transport = transport
        self.num_bytes = int(self.receive(_READY_S))

    def __enter__(self) -> "Pusher":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self.process.join(self._timeout_s)
        self.process.terminate()

    def push(self) -> Pushed:
        """Push one update; return its result."""
        return self._ask(Flaw.NONE)

    def push_in_vain(self, flaw: Flaw) -> Pushed:
        """Push an update, then one with this flaw."""
        return self._ask(flaw)

    def flaws(self) -> list[Flaw]:
        """The flaws that this way can have. A trainer gives up only an update of more than one part, of which the
        gateway hears before the last. TRL's client sends no log-probs."""
        from trainer_client.transports.tensors import PART_BYTES

        if self._transport == "trl":
            return [Flaw.NAN]
        can_halve = self._transport != "store" and self.num_bytes > 2 * PART_BYTES
        return [Flaw.LOGPROBS, *([Flaw.HALF] if can_halve else [])]

    def _ask(self, flaw: Flaw) -> Pushed:
        self.pipe.send(flaw)
        pushed: Pushed = self.receive(10 * self._timeout_s)
        return pushed


class TrlsClient(AbstractContextManager["TrlsClient"]):
    """Pushes as TRL's trainers do. It joins the group at the first push; options of a push are left out."""

    def __init__(self, url: str, device: str) -> None:
        from trl.generation.vllm_client import VLLMClient

        self._client = VLLMClient(url, group_port=free_port())
        self._device = device
        self._version = 0

    def push(self, named_tensors: dict[str, Any], **_: Any) -> int:
        """Return the number of pushes. Raise `WeightUpdateFailed`."""
        try:
            if not self._version:
                self._client.init_communicator(self._device)
            described = [
                (name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in named_tensors.items()
            ]
            self._client.update_named_params(described, iter(named_tensors.items()))
        except Exception as error:  # TRL raises no narrower one
            raise WeightUpdateFailed(str(error)) from error
        self._version += 1
        return self._version

    def __exit__(self, *_: object) -> None:
        self._client.close_communicator()


def sender_of(client: BlockingRolloutClient, transport: Way, device: str, timeout_s: float) -> Any:
    """Return the sender of a way: a context with a method `push`."""
    if transport == "trl":
        return TrlsClient(client.url, device)
    return WeightSender(client, transport=transport, device=device, timeout_s=timeout_s)


def _serve(pipe: Connection, url: str, transport: Way, device: str, timeout_s: float) -> None:
    """Run the process until the other end of the pipe closes."""
    import torch

    with BlockingRolloutClient(url) as client:
        served = client.served_weights()
        if served.tensors is None:
            raise SystemExit(f"the replicas behind {url} do not tell the names and shapes of their weights")
        torch.manual_seed(0)
        tensors = {one.name: _drawn(one.name, one.shape, getattr(torch, one.dtype), device) for one in served.tensors}
        pipe.send(sum(tensor.nbytes for tensor in tensors.values()))
        with sender_of(client, transport, device, timeout_s) as sender:
            while True:
                try:
                    flaw: Flaw = pipe.recv()
                except (EOFError, KeyboardInterrupt):
                    return
                told: list[float] | None = None
                began = time.perf_counter()
                try:
                    if flaw is not Flaw.NONE:
                        told = [-1.0] * (len(client.canary_token_ids()) - 1)
                        sender.push(tensors, canary_logprobs=told)
                        told, began = [_NO_LOGPROB] * len(told), time.perf_counter()
                    version, error = sender.push(_flawed(tensors, flaw), canary_logprobs=told), ""
                except RolloutGatewayError as refused:
                    version, error = 0, f"{type(refused).__name__}: {refused}"
                pipe.send(Pushed(seconds=time.perf_counter() - began, version=version, error=error))


def _flawed(
    tensors: "Mapping[str, torch.Tensor]", flaw: Flaw
) -> "Mapping[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]]":
    if flaw is Flaw.HALF:
        return _given_up(tensors)
    if flaw is Flaw.NAN:
        name = next(iter(tensors))
        return {**tensors, name: tensors[name] * float("nan")}
    return tensors


def _given_up(tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield all tensors, then fail as a trainer without memory for the next."""
    yield from tensors.items()
    raise WeightUpdateFailed("the trainer gives up")


def _drawn(name: str, shape, dtype, device: str):  # type: ignore[no-untyped-def]  # torch is loaded here alone
    """Return random tensors, small enough for finite outputs."""
    import torch

    if "norm" in name:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, 0.02).to(dtype)
