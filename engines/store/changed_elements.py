"""A tensor as its difference from another of equal size: gaps between changed elements, and their new values.

In a step of reinforcement learning a few percent of the bfloat16 elements change, and almost every block of 4 KiB has
some (docs/trainer_client.md): so elements are stored, and not blocks.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engines.errors import InvalidRequest

Array: TypeAlias = npt.NDArray[Any]

_PIECE = 1 << 20  # elements compared at a time: they fit into a core's cache
_KINDS: tuple[np.dtype[Any], ...] = (np.dtype("u1"), np.dtype("u2"))
_WIDTHS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedElements:
    """`gaps` (uint8 or uint16) counts the unchanged elements before each stored one; `values` (unsigned, as wide as the
    elements) are the new values. A gap too wide for its type is split by an unchanged element."""

    gaps: Array
    values: Array

    @classmethod
    def between(cls, old: Array, new: Array, width: int) -> "ChangedElements":
        """The difference of two byte arrays of equal length; `width` is the bytes of an element."""
        width = next(one for one in _WIDTHS if width % one == 0)
        unsigned = np.dtype(f"u{width}")
        before, after = old.view(unsigned), new.view(unsigned)
        places = np.concatenate(
            [
                np.flatnonzero(before[begin : begin + _PIECE] != after[begin : begin + _PIECE]) + begin
                for begin in range(0, max(1, after.size), _PIECE)
            ]
        )
        gaps = np.diff(places, prepend=-1) - 1
        kind = min(_KINDS, key=lambda one: (gaps.size + int((gaps // _reach(one)).sum())) * (one.itemsize + width))
        if gaps.size and gaps.max() >= _reach(kind):
            places = _with_stops(places, gaps // _reach(kind), _reach(kind))
            gaps = np.diff(places, prepend=-1) - 1
        return cls(gaps.astype(kind), after[places])

    @property
    def num_bytes(self) -> int:
        return int(self.gaps.nbytes + self.values.nbytes)

    def apply_to(self, content: Array) -> None:
        """Turns the old tensor's bytes into the new one's, in place. Raises `InvalidRequest` where sizes do not fit."""
        try:
            content.view(self.values.dtype)[np.cumsum(self.gaps.astype(np.int64) + 1) - 1] = self.values
        except (IndexError, ValueError) as error:
            raise InvalidRequest(
                f"changed elements are damaged: {self.gaps.size} gaps and {self.values.size} values for a tensor of "
                f"{content.size} bytes",
                param="snapshot",
            ) from error


def _reach(kind: np.dtype[Any]) -> int:
    """The smallest gap that is too wide for the type."""
    return int(np.iinfo(kind).max) + 1


def _with_stops(places: Array, stops: Array, reach: int) -> Array:
    """The places, with `stops` more before each, at distances of `reach`."""
    runs = stops + 1
    back = np.repeat(np.cumsum(runs), runs) - np.arange(1, int(runs.sum()) + 1)
    stopped: Array = np.repeat(places, runs) - back * reach
    return stopped
