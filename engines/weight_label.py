"""The label of an engine's weights: it alone tells a gateway, also one that was restarted, what the engine holds.

    17-3f9a2c1e               version 17 as update 3f9a2c1e made it, committed
    18-77aa0b12?17-3f9a2c1e   version 18 before the verdict on it; 17-3f9a2c1e was the last here that was committed
    ?17-3f9a2c1e              weights that are being overwritten, of no version
    default                   the checkpoint, or what a server of others came with: version 0, as any other text

An engine gets the label with `?` when its bytes are in, and the committed one after the verdict. So weights with a `?`
that a gateway finds when it starts, or when a replica returns, were committed by nobody: they are loaded again. The id
of the update tells a version from another of the same number, of an aborted push or of another run.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

CHECKPOINT = "0"
_HELD = r"[0-9]+(?:-[0-9a-f]{8})?"
_LABEL = re.compile(rf"({_HELD})|({_HELD})?\?({_HELD})")


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """A label that was read. `held` is the version with its update, "" for weights of no version; `committed` is the
    last here that was committed, the same where `held` was."""

    held: str = CHECKPOINT
    committed: str = CHECKPOINT

    @classmethod
    @lru_cache(maxsize=64)
    def read(cls, text: str) -> "WeightLabel":
        """Return what the text of a label tells."""
        if (found := _LABEL.fullmatch(text)) is None:
            return cls()
        whole, held, before = found.groups()
        return cls(whole, whole) if whole else cls(held or "", before)

    @property
    def is_committed(self) -> bool:
        return self.held == self.committed

    @property
    def version(self) -> int:
        """The version of tokens that are made under this label; 0 for weights of no version."""
        return version_of(self.held)


def committed_label(version: int, update: str) -> str:
    """Return the label of a version that this update, 8 hexadecimal digits, has made and committed."""
    return f"{version}-{update}"


def open_label(held: str, committed: str) -> str:
    """Return the label of weights before the verdict on them; `held` is "" while they are overwritten."""
    return f"{held}?{committed}"


def version_of(label: str) -> int:
    """Return the version of a committed label."""
    return int(label.partition("-")[0] or 0)


def is_given(text: str) -> bool:
    """Return True for a label that a gateway gives. A server starts with another, mostly "default"."""
    return _LABEL.fullmatch(text) is not None
