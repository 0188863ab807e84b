"""The work that clients ask of the gateway: prompts with their samples, in the order that they depend on each other."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.dialects.group_parts import part_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt with its samples. `lengths` are those that the model will make, `limit` the longest allowed.

    `text` is equal for equal prompts. `prefix` names the prompt in KV caches: all turns of a session have one name, of
    which the first `known` tokens were computed in earlier turns. `after_s` is the time from the end of the ask before
    it, such as a tool's. `is_last` is True for a turn after which the client reports the end of its session. `made`
    tokens of each sample were made before, with other weights.
    """

    request: str
    text: int
    prefix: Hashable
    prompt: int
    lengths: tuple[int, ...]
    limit: int
    session: str = ""
    known: int = 0
    after_s: float = 0.0
    is_last: bool = False
    made: int = 0

    def parts(self, most: int | None) -> list["Ask"]:
        """Return the samples in the parts that a gateway makes of them; those of a session stay together."""
        size = len(self.lengths) if self.session else part_size(len(self.lengths), most)
        places = range(0, len(self.lengths), size)
        return [replace(self, lengths=self.lengths[place : place + size]) for place in places]

    @property
    def longest(self) -> int:
        """Tokens of the prompt and its longest sample."""
        return self.prompt + max(self.lengths)


Chain = Sequence[Ask]
"""Asks of which each waits for the one before."""
Phase = Sequence[Chain]
"""Chains that begin together, such as a trainer's batch; the next phase begins when all have ended."""
Stream = Sequence[Phase]


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams run beside each other; the phases of a stream run one after the other."""

    streams: Sequence[Stream]

    def asks(self) -> Iterator[Ask]:
        for stream in self.streams:
            for phase in stream:
                for chain in phase:
                    yield from chain
