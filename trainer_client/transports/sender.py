"""Weights of a trainer to all replicas in one call, whatever carries them. Loads torch with the first push."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from engines.announcement import check_tensors
from engines.errors import ConfigError, RolloutGatewayError
from engines.types import InFlight
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.progress import OnWeightProgress, WeightProgress
from trainer_client.push_options import PushOptions
from trainer_client.served import ServedWeights

if TYPE_CHECKING:
    import torch

    from trainer_client.transports.part import Part
    from trainer_client.transports.pushed import Pushed
    from trainer_client.transports.tensors import Entry, Given, Source
    from trainer_client.transports.trainer_ranks import Narrow, Outcome, Ranks, TrainerRanks

_WAITS_BETWEEN_WORDS = 5
"""Of the rank that sends, such as those for a group and for rollouts in flight, while the others await its word."""

TransportName = Literal["store", "gloo", "nccl"]


class Transport(Protocol):
    """How one version gets to the engines."""

    def push(self, parts: "Iterator[Part]", options: PushOptions) -> int:
        """Returns the version once all replicas serve it."""

    def close(self, reason: str = ...) -> None:
        """Let go of what is held between two pushes. May be called twice."""


class WeightSender:
    """Sends versions of the policy to all replicas behind `client`.

    `transport` is "store" (a folder that trainer and engines share; vLLM and SGLang alike), or a group with all workers
    of all engines over "gloo" or "nccl"; unless named, the group that the engines say they receive over. `dtype` is
    what floats are sent in, unless given the dtypes that the engines hold them in. With `delta` only those tensors are
    sent whose bytes have changed since this sender's last push (over a group all of their layer, which vLLM loads
    together); where another has made what is served, all are. Into the store, of a tensor with few changed elements
    these alone: for that the sender keeps what it pushed last in host memory. `timeout_s` bounds each wait: for a
    group, for rollouts in flight, for the tensors, for the commit. `on_progress` is told of every tensor. A trainer of
    many ranks makes one sender and keeps it.

    Of a group: `device` is the trainer's GPU for NCCL; `address` and `port` are where engines find the trainer: unless
    given, where the gateway finds it, and a free port.
    Of the store: `folder` is where this machine sees it, what the gateway calls it unless given.
    """

    def __init__(
        self,
        client: BlockingRolloutClient,
        *,
        transport: TransportName | None = None,
        dtype: "torch.dtype | None" = None,
        delta: bool = False,
        device: "torch.device | str | None" = None,
        address: str = "",
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
        self._delta = delta
        self._pushed: Pushed | None = None
        self._device = device
        self._address = address
        self._port = port
        self._folder = folder
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._transport: Transport | None = None
        self._groups: dict[tuple[int, ...], TrainerRanks] = {}

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
        in_flight: InFlight | Literal["keep", "recompute", "abort", "drain"] | None = None,
    ) -> int:
        """Have every replica serve these tensors. Returns their version, the next one unless `version` is given.

        `named_tensors` is a model (plain, compiled, DDP, FSDP, FSDP2 or tensor-parallel), a mapping, or pairs of name
        and tensor, DTensors among them; names are the checkpoint's. An iterator is read as it is sent, at most 1 GiB
        ahead (with `delta` over a group to the end of a layer), and must give each tensor its own memory. Tensors that
        are left out stay as they are; over a group those that vLLM fuses go together. Where any is sharded, or the
        model is DDP's, every rank of it calls this with the same arguments: they gather at most 256 MiB at a time (or
        one tensor), the first rank sends, and all return the version or raise what the first met.
        `canary_logprobs` are the trainer's own of the client's `canary_token_ids`, all but the first. With `rolling`
        replicas take the version one after the other while the others serve, which the store alone can. `in_flight` is
        what becomes of rollouts in flight: frozen while engines are overwritten ("keep"), and read again by the new
        weights ("recompute"), ended and taken up again from their tokens ("abort"), or waited for ("drain"). Both are
        as the gateway's `weights` say unless given.

        Raises the gateway's own error: `InvalidRequest` where names, shapes or dtypes are not the model's,
        `WeightUpdateConflict` where another update is under way or `version` cannot be, `WeightUpdateFailed` with the
        replica's name, `StoreFailed`, `DeadlineExceeded`, `GatewayUnreachable`. The version before is served then, and
        another push may be tried.
        """
        from trainer_client.transports.tensors import Given

        given = Given(named_tensors, by_layer=self._delta and self._by_layer)
        ranks = self._ranks(tuple(given.ranks))
        pushed = self._pushed_before()
        pushed.begin()
        options = PushOptions(
            version=version, canary_logprobs=canary_logprobs, rolling=rolling, in_flight=_in_flight(in_flight)
        )

        def narrow(entries: "list[Entry]", served: ServedWeights) -> "list[Entry]":
            return pushed.changed(entries, served, ranks.any_rank) if self._delta else entries

        if ranks.is_sender:
            done, served = self._send(given, ranks, narrow, options)
        else:
            done, served = ranks.follow(given, self._dtype, narrow)
        if served is not None:
            pushed.committed(served)
        return done

    @property
    def _by_layer(self) -> bool:
        """The store holds whole versions; a group moves what vLLM then puts together layer by layer."""
        return self._name != "store"

    def close(self, reason: str = "the trainer closed the group") -> None:
        """Leave the group, where there is one. May be called twice; the next push opens another."""
        if self._transport is not None:
            self._transport.close(reason)

    def _send(
        self,
        given: "Given",
        ranks: "Ranks",
        narrow: "Narrow",
        options: PushOptions,
    ) -> "Outcome":
        """The sender's part of a push, with which every other rank learns of its end."""
        try:
            parts = self._checked_parts(given, ranks, narrow)
            first = next(parts)  # so that what does not fit is refused before anything is touched
            done = self._transport_made().push(chain([first], parts), options)
            outcome = done, self._served_as(done) if self._delta else None
        except BaseException as error:
            ranks.end(error)
            raise
        ranks.end(outcome)
        return outcome

    def _served_as(self, version: int) -> ServedWeights | None:
        """None where another trainer was quick, or the gateway cannot be asked: the push went well all the same."""
        with contextlib.suppress(RolloutGatewayError):
            served = self._client.served_weights()
            return served if served.version == version else None
        return None

    def _pushed_before(self) -> "Pushed":
        from trainer_client.transports.pushed import Pushed

        if self._pushed is None:
            self._pushed = Pushed(by_layer=self._by_layer)
        return self._pushed

    def _transport_made(self) -> Transport:
        if self._transport is None:
            self._transport = self._make_transport()
        return self._transport

    def _make_transport(self) -> Transport:
        if self._name == "store":
            from trainer_client.transports.store import StoreTransport

            return StoreTransport(self._client, self._timeout_s, self._folder, delta=self._delta)
        from trainer_client.transports.group import GroupTransport

        return GroupTransport(
            self._client,
            self._timeout_s,
            backend=self._name,
            device=self._device,
            address=self._address,
            port=self._port,
        )

    def _ranks(self, ranks: tuple[int, ...]) -> "Ranks":
        """Made once: a group of the trainer's is opened by all of its ranks together."""
        from trainer_client.transports.trainer_ranks import Alone, TrainerRanks

        if not ranks:
            return Alone()
        if ranks not in self._groups:
            self._groups[ranks] = TrainerRanks(ranks, _WAITS_BETWEEN_WORDS * self._timeout_s)
        return self._groups[ranks].begun()

    def _checked_parts(self, given: "Given", ranks: "Ranks", narrow: "Narrow") -> "Iterator[Part]":
        """The parts, each found to fit the served model, which tell how far the update is as far as it is known."""
        from trainer_client.transports.part import Part
        from trainer_client.transports.tensors import announced

        tensors = bytes_sent = num_tensors = num_bytes = 0

        def tell(entry: "Entry") -> None:
            nonlocal tensors, bytes_sent
            tensors, bytes_sent = tensors + 1, bytes_sent + entry.num_bytes
            if self._on_progress is not None:
                self._on_progress(
                    WeightProgress(tensors=tensors, num_tensors=num_tensors, bytes=bytes_sent, num_bytes=num_bytes)
                )

        served = self._client.served_weights()
        for entries in given.parts(served.tensors, self._dtype):
            ranks.agree(entries, served)
            sent = narrow(entries, served)
            check_tensors(announced(entries), served, "named_tensors")
            num_tensors += len(sent)
            num_bytes += sum(entry.num_bytes for entry in sent)
            if sent:
                yield Part(sent, ranks, tell)


def _in_flight(word: str | None) -> InFlight | None:
    if word is None:
        return None
    if word not in list(InFlight):
        raise ConfigError(f"in_flight = {word!r} is none of {', '.join(InFlight)}")
    return InFlight(word)
