"""Loads an update's tensors in exchange for the weights that they replace, so that a refused update is undone by copies
within the device.

The weights are kept in the memory of the tensors, place for part. That is exact only between equal dtypes, and where
no other copy of the update reads the part or writes the place. All other weights that are replaced, such as the
padding behind a vocabulary, are kept aside, in memory of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engines.transfer.device_swap import DeviceSwap

_Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Places and as many parts of tensors, or contents: one kernel copies a list of one kind."""

ASIDE_BYTES = 256 << 20
"""Limit on the weights that are kept aside: a small part of what a device has free besides staged tensors
(`tee.room_on`)."""

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

    @property
    def is_of_words(self) -> bool:
        """True where a GPU's kernel can exchange both."""
        return all(
            one.is_cuda and one.is_contiguous() and one.data_ptr() % 4 == 0 and one.nbytes % 4 == 0
            for one in (self.place, self.part)
        )


@dataclass(frozen=True, slots=True)
class Fill:
    """A fill of `place` with a number: a shard of a vocabulary has padding rows behind its content."""

    place: torch.Tensor
    value: float


class Exchange:
    """One load. `load` comes first, then `take_back` or `give_back`, once."""

    def __init__(self, moves: Sequence[Move], fills: Sequence[Fill]) -> None:
        swapped = [move for move in moves if move.swaps]
        self._swapped = _alike(swapped)
        self._swap = _swap_of([(move.place, move.part) for move in swapped if move.is_of_words])
        self._one_by_one = [(move.place, move.part) for move in swapped if not move.is_of_words]
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
        with torch.inference_mode():
            self._aside = [place.clone() for place in self._overwritten]
            held = self._scratch()  # the last memory that is taken, before the first weight is overwritten
            if self._swap is not None:
                self._swap.run()
            for place, part in self._one_by_one:
                content = held[: place.nbytes].view(place.dtype).view(place.shape).copy_(place)
                place.copy_(part)
                part.copy_(content)
            _copy(self._copied)
            for fill in self._fills:
                fill.place.fill_(fill.value)

    def _scratch(self) -> torch.Tensor:
        """Return memory for any one of the places that are exchanged by copies."""
        size = max((place.nbytes for place, _ in self._one_by_one), default=0)
        device = self._one_by_one[0][0].device if self._one_by_one else None
        return torch.empty(size, dtype=torch.uint8, device=device)

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


def _swap_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "DeviceSwap | None":
    if not pairs:
        return None
    from engines.transfer.device_swap import DeviceSwap  # needs Triton, which CPU hosts may lack

    return DeviceSwap(pairs)


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


def _copy(pairs: Iterable[_Pairs]) -> None:
    """Copy into the first tensors of each pair from the second."""
    for places, parts in pairs:
        torch._foreach_copy_(places, parts)
