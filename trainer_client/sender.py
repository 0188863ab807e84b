"""Weights of a trainer to all replicas in one call, whatever carries them. Loads torch with the first push."""

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from engines.errors import ConfigError, InvalidRequest
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.progress import OnWeightProgress, WeightProgress

if TYPE_CHECKING:
    import torch

    from trainer_client.tensors import Entry, Part, Source

TransportName = Literal["store", "gloo", "nccl"]


class Transport(Protocol):
    """How one version gets to the engines."""

    def push(
        self,
        parts: "Iterator[Part]",
        version: int | None,
        canary_logprobs: Sequence[float] | None,
        rolling: bool | None,
    ) -> int:
        """Returns the version once all replicas serve it."""

    def close(self, reason: str = ...) -> None:
        """Let go of what is held between two pushes. May be called twice."""


class WeightSender:
    """Sends versions of the policy to all replicas behind `client`.

    `transport` is "store" (a folder that trainer and engines share; vLLM and SGLang alike), or a group with all workers
    of all engines over "gloo" or "nccl"; unless named, the group that the engines say they receive over. `dtype` is
    what floats are sent in, their own unless given: the engines' saves half the bytes of a float32 trainer. `timeout_s`
    bounds each wait: for a group, for rollouts in flight, for the tensors, for the commit. `on_progress` is told of
    every tensor.

    Of a group: `device` is the trainer's GPU for NCCL, `port` where engines find the trainer, a free one unless given.
    Of the store: `folder` is where this machine sees it, what the gateway calls it unless given.
    """

    def __init__(
        self,
        client: BlockingRolloutClient,
        *,
        transport: TransportName | None = None,
        dtype: "torch.dtype | None" = None,
        device: "torch.device | str | None" = None,
        port: int = 0,
        folder: str | os.PathLike[str] | None = None,
        timeout_s: float = 300.0,
        on_progress: OnWeightProgress | None = None,
    ) -> None:
        if transport not in (None, "store", "gloo", "nccl"):
            raise ConfigError(f"transport = {transport!r} is none of 'store', 'gloo', 'nccl'")
        self._client = client
        self._name = transport
        self._dtype = dtype
        self._device = device
        self._port = port
        self._folder = folder
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._transport: Transport | None = None

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def push(
        self,
        named_tensors: "Source",
        version: int | None = None,
        *,
        canary_logprobs: Sequence[float] | None = None,
        rolling: bool | None = None,
    ) -> int:
        """Have every replica serve these tensors. Returns their version, the next one unless `version` is given.

        `named_tensors` is an `nn.Module`, a mapping, or pairs of name and tensor; names are the checkpoint's. An
        iterator is read as it is sent, at most 1 GiB ahead. Tensors that are left out stay as they are.
        `canary_logprobs` are the trainer's own of the client's `canary_token_ids`, all but the first. With `rolling`
        replicas take the version one after the other while the others serve, which the store alone can; unless given
        it is as the gateway's `weights.rolling` says.

        Raises the gateway's own error: `InvalidRequest` where names, shapes or dtypes are not the model's,
        `WeightUpdateConflict` where another update is under way or `version` cannot be, `WeightUpdateFailed` with the
        replica's name, `StoreFailed`, `DeadlineExceeded`, `GatewayUnreachable`. The version before is served then, and
        another push may be tried.
        """
        if self._transport is None:
            self._transport = self._made()
        return self._transport.push(self._parts(named_tensors), version, canary_logprobs, rolling)

    def close(self, reason: str = "the trainer closed the group") -> None:
        """Leave the group, where there is one. May be called twice; the next push opens another."""
        if self._transport is not None:
            self._transport.close(reason)

    def _made(self) -> Transport:
        if self._name == "store":
            from trainer_client.store_transport import StoreTransport

            return StoreTransport(self._client, self._timeout_s, self._folder)
        from trainer_client.group_transport import GroupTransport

        return GroupTransport(self._client, self._timeout_s, backend=self._name, device=self._device, port=self._port)

    def _parts(self, source: "Source") -> "Iterator[Part]":
        """The first is made here and now, so that what is no source is refused before anybody is asked."""
        from trainer_client.tensors import parts_of

        parts = parts_of(source, self._dtype)
        first = next(parts, None)
        if first is None:
            raise InvalidRequest("named_tensors is empty: an update needs at least one tensor", param="named_tensors")
        return self._told(first, parts)

    def _told(self, first: "list[Entry]", others: "Iterator[list[Entry]]") -> "Iterator[Part]":
        """The parts, which tell how far the update is as far as it is known."""
        from itertools import chain

        from trainer_client.tensors import Part

        tensors = sent = num_tensors = num_bytes = 0

        def tell(entry: "Entry") -> None:
            nonlocal tensors, sent
            tensors, sent = tensors + 1, sent + entry.num_bytes
            if self._on_progress is not None:
                self._on_progress(
                    WeightProgress(tensors=tensors, num_tensors=num_tensors, bytes=sent, num_bytes=num_bytes)
                )

        for entries in chain([first], others):
            part = Part(entries, tell)
            num_tensors, num_bytes = num_tensors + len(entries), num_bytes + part.num_bytes
            yield part
