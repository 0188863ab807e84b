"""A part of a push: tensors that a transport announces and then sends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engines.transfer.packing import NamedTensor
from trainer_client.transports.tensors import Entry, announced
from trainer_client.transports.trainer_ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part. `ranks` gathers its tensors; `on_sent` is called after each tensor."""

    entries: Sequence[Entry]
    ranks: Ranks
    on_sent: Callable[[Entry], None]

    @property
    def announced(self) -> dict[str, object]:
        """The part in the form of /update_weights."""
        return announced(self.entries)

    @property
    def tensors(self) -> Iterator[NamedTensor]:
        """Yield each tensor when its turn comes, or gathered shortly before."""
        for run in self.ranks.runs(self.entries):
            for entry, tensor in zip(run, self.ranks.gather(run), strict=True):
                yield from entry.sent_as(tensor).items()
                self.on_sent(entry)
