"""A reply as JSON in pieces: a choice is written when its prompt ends, and the whole is never copied."""

from dataclasses import dataclass, field

from engines.engine import Json
from gateway.dialects.raw_json import encoded


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
        self.ends.append({"finish_reason": choice["finish_reason"], "weight_versions": choice["weight_versions"]})

    @property
    def num_bytes(self) -> int:
        """About the length of the whole."""
        return sum(map(len, self.choices))

    def pieces(self) -> list[bytes]:
        """Return the reply, which is kept until it is delivered: its client may go before, and a replay gets it."""
        pieces = [encoded(self.head)[:-1] + b',"choices":[']
        for choice in self.choices:
            pieces += [choice, b","]
        return [*pieces[:-1], b"]}"]
