"""Digests of the tensors pushed last, so that only changed tensors are sent."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Protocol

import torch

from engines.errors import DeadlineExceeded, InvalidRequest
from engines.transfer.tensor_bytes import digest_on_host
from trainer_client.served import ServedWeights
from trainer_client.transports.model_tensors import parts_here
from trainer_client.transports.tensors import Entry, layer_of


class AnyRank(Protocol):
    """Reduces flags of the same tensors over all ranks: set if set on any rank. Raises where a rank says `failed`."""

    def __call__(self, flags: Sequence[bool], *, failed: bool = False) -> list[bool]: ...


class Pushed:
    """This rank's part of the last pushed version. Digests are of the bytes sent, after the cast."""

    def __init__(self, *, by_layer: bool) -> None:
        """`by_layer` if engines need all tensors of a layer together."""
        self._by_layer = by_layer
        self.adds_to: str | None = None
        """Id of the update whose weights this push adds to; None for a push of all tensors."""
        self._served: str | None = None
        self._held: dict[str, object] = {}
        self._new: dict[str, object] = {}

    def changed(self, entries: list[Entry], served: ServedWeights, any_rank: AnyRank) -> list[Entry]:
        """Return the changed entries of one part; all if the served version is another trainer's."""
        is_first = not self._new
        try:
            mine = self._changed_here(entries, served)
        except BaseException:
            with suppress(DeadlineExceeded):  # a rank is gone too, and this error came first
                any_rank([False] * len(entries), failed=True)  # the others wait for this rank's flags
            raise
        flags = any_rank(mine)
        moved = {self._unit(entry.name) for entry, flag in zip(entries, flags, strict=True) if flag}
        if is_first and not moved:
            # A version needs a tensor: send the smallest.
            moved = {self._unit(min(entries, key=lambda entry: entry.num_bytes).name)}
        return [entry for entry in entries if self._unit(entry.name) in moved]

    def _changed_here(self, entries: list[Entry], served: ServedWeights) -> list[bool]:
        """Digest the tensors, and return a flag for each that is set where it differs from the last push."""
        digests = dict(zip((entry.name for entry in entries), _digests(entries), strict=True))
        if self._by_layer:
            self._check_layers_are_whole(digests)
        self._new |= digests
        self.adds_to = self._served if served.update == self._served else None
        return [self.adds_to is None or self._held.get(name) != digest for name, digest in digests.items()]

    def _check_layers_are_whole(self, names: Iterable[str]) -> None:
        gone = {layer_of(name) for name in self._new}
        for name in names:
            if layer_of(name) in gone:
                raise InvalidRequest(
                    f"{name!r} is in another part than other tensors of {layer_of(name)!r}, which must be sent "
                    "together: order the iterator's tensors layer by layer, or leave out delta",
                    param="named_tensors",
                )

    def begin(self) -> None:
        self._new, self.adds_to = {}, None

    def committed(self, served: ServedWeights) -> None:
        """Record that the push made the served version, which has tensors of pushes before it where it adds to them."""
        held = self._held if self.adds_to is not None else {}
        self._served, self._held = served.update, held | self._new

    def _unit(self, name: str) -> str:
        return layer_of(name) if self._by_layer else name


def _digests(entries: Sequence[Entry]) -> list[object]:
    """Return digests: texts, or numbers for tensors on a GPU, with one wait for each GPU."""
    by_tensor = [[_digest(part.detach().to(entry.dtype)) for part in parts_here(entry.tensor)] for entry in entries]
    on_gpus: defaultdict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for one in chain.from_iterable(by_tensor):
        if isinstance(one, torch.Tensor):
            on_gpus[one.device].append(one)
    known = {device: iter(torch.stack(numbers).tolist()) for device, numbers in on_gpus.items()}
    return [
        tuple(next(known[one.device]) if isinstance(one, torch.Tensor) else one for one in digests)
        for digests in by_tensor
    ]


def _digest(part: torch.Tensor) -> object:
    if not part.numel():
        return ""
    if not part.is_cuda:
        return digest_on_host(part)
    from engines.transfer.device_sum import sums_on_device  # needs Triton, which CPU hosts lack

    return sums_on_device([part])[0]
