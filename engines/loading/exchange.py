"""Loads an update's tensors in exchange for the weights that they replace, so that a refused update is undone by copies
within the device.

The weights are kept in the memory of the tensors, place for part. That is exact only between equal dtypes, and where
no other copy of the update reads the part or writes the place. All other weights that are replaced, such as the
padding behind a vocabulary, are kept aside, in memory of their own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

_Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Places and as many parts of tensors, or contents: one kernel copies a list of one kind."""

_SCRATCH_BYTES = 64 << 20
ASIDE_BYTES = 256 << 20
"""Limit on the weights that are kept aside: with the scratch memory a small part of what a device has free besides
staged tensors (`tee.room_on`)."""

Span = tuple[int, int, int]
"""Begin, end and key of elements."""


@dataclass(frozen=True, slots=True)
class Move:
    """A copy into `place`, a part of a parameter, from `part` of a received tensor.

    swaps: True where the part can keep the content of the place.
    """

    place: torch.Tensor
    part: torch.Tensor
    swaps: bool


@dataclass(frozen=True, slots=True)
class Fill:
    """A fill of `place` with a number: a shard of a vocabulary has padding rows behind its content."""

    place: torch.Tensor
    value: float


class Exchange:
    """One load. `load` comes first, then `take_back` or `give_back`, once."""

    def __init__(self, moves: Sequence[Move], fills: Sequence[Fill]) -> None:
        self._swapped = _alike(move for move in moves if move.swaps)
        self._copied = _alike(move for move in moves if not move.swaps)
        self._fills = fills
        self._overwritten = [move.place for move in moves if not move.swaps] + [fill.place for fill in fills]
        self._aside: list[torch.Tensor] = []

    @property
    def aside_bytes(self) -> int:
        """Memory that `load` takes for weights that no tensor can keep."""
        return sum(place.nbytes for place in self._overwritten)

    def load(self) -> None:
        """Load the tensors. After an error the weights are a mixture, and cannot be taken back."""
        batches = list(_in_batches(self._swapped))
        with torch.inference_mode():
            self._aside = [place.clone() for place in self._overwritten]
            scratch = _scratch(batches)  # the last memory that is taken, before the first weight is overwritten
            for places, parts in batches:
                _exchange(places, parts, scratch)
            _copy(self._copied)
            for fill in self._fills:
                fill.place.fill_(fill.value)

    def take_back(self) -> None:
        """Restore the weights from before the load."""
        with torch.inference_mode():
            _copy(self._swapped)
            for place, content in zip(self._overwritten, self._aside, strict=True):
                place.copy_(content)

    def give_back(self) -> None:
        """Restore the tensors, for their readers; the weights stay."""
        with torch.inference_mode():
            _copy((parts, places) for places, parts in self._swapped)


def overlapping(spans: Iterable[Span]) -> set[int]:
    """Return the keys of spans that share elements with another."""
    found: set[int] = set()
    furthest = (0, 0, 0)
    for span in sorted(spans):
        begin, end, key = span
        if begin < furthest[1]:
            found |= {key, furthest[2]}
        furthest = span if end > furthest[1] else furthest
    return found


def _alike(moves: Iterable[Move]) -> list[_Pairs]:
    """Return the moves as lists of one shape and layout and one pair of dtypes."""
    pairs: dict[tuple[object, ...], _Pairs] = {}
    for move in moves:
        place, part = move.place, move.part
        key = place.shape, place.dtype, part.dtype, place.is_contiguous(), part.is_contiguous()
        places, parts = pairs.setdefault(key, ([], []))
        places.append(place)
        parts.append(part)
    return list(pairs.values())


def _in_batches(alike: Iterable[_Pairs]) -> Iterator[_Pairs]:
    """Cut lists, and tensors that are larger, into batches for the scratch memory."""
    for places, parts in alike:
        if places[0].nbytes > _SCRATCH_BYTES and places[0].dim():
            for place, part in zip(places, parts, strict=True):
                yield from _in_batches(_cut(place, part))
            continue
        width = max(1, _SCRATCH_BYTES // max(1, places[0].nbytes))
        for begin in range(0, len(places), width):
            yield places[begin : begin + width], parts[begin : begin + width]


def _cut(place: torch.Tensor, part: torch.Tensor) -> Iterator[_Pairs]:
    """Cut a large pair into as many rows as fit the scratch memory, or into single rows without their dimension."""
    rows = place.shape[0] * _SCRATCH_BYTES // place.nbytes
    cuts = (place.split(rows), part.split(rows)) if rows else (place.unbind(), part.unbind())
    return (([one], [other]) for one, other in zip(*cuts, strict=True))


def _scratch(batches: Sequence[_Pairs]) -> torch.Tensor:
    """Return memory for the content of any of these batches, on their device."""
    if not batches:
        return torch.empty(0, dtype=torch.uint8)
    num_bytes = max(_num_bytes(places) for places, _ in batches)
    return torch.empty(num_bytes, dtype=torch.uint8, device=batches[0][0][0].device)


def _num_bytes(alike: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in alike)


def _copy(pairs: Iterable[_Pairs]) -> None:
    """Copy into the first tensors of each pair from the second."""
    for places, parts in pairs:
        torch._foreach_copy_(places, parts)


def _exchange(places: list[torch.Tensor], parts: list[torch.Tensor], scratch: torch.Tensor) -> None:
    """Exchange tensors of one shape and dtype."""
    content = scratch[: _num_bytes(places)].view(places[0].dtype)
    held = list(content.view(len(places), *places[0].shape).unbind())
    torch._foreach_copy_(held, places)
    torch._foreach_copy_(places, parts)
    torch._foreach_copy_(parts, held)
