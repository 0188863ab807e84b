"""A reply as JSON in pieces: a choice is written when its prompt ends, and the whole is never copied."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engines.engine import Json
from gateway.dialects.replies.carried import encoded

_OF_THE_END = ("finish_reason", "weight_versions")


@dataclass(slots=True)
class Written:
    """Fields beside the choices, the choices as JSON, and the ends of the choices: how each ended, and its versions.

    `seconds` are the times at which the prompts ended, from the request's start.
    """

    head: Json = field(default_factory=Json)
    choices: list[bytes] = field(default_factory=list)
    ends: list[Json] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, choice: Json) -> None:
        """Write a choice."""
        self.choices.append(encoded(choice))
        self.ends.append({key: choice[key] for key in _OF_THE_END if key in choice})

    @property
    def num_bytes(self) -> int:
        """About the length of the whole."""
        return sum(map(len, self.choices))

    def pieces(self) -> Iterator[bytes]:
        """Yield the reply. It is kept until it is delivered: its client may go before the end, and a replay gets it."""
        yield encoded(self.head)[:-1] + b',"choices":['
        for place, choice in enumerate(self.choices):
            if place:
                yield b","
            yield choice
        yield b"]}"
