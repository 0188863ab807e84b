"""Agents: sessions of turns whose prompt is all that was said before, with a tool at work between them."""

from dataclasses import dataclass, replace
from random import Random

from engines.errors import ConfigError
from tuning.simulate.workloads.lengths import LogNormal
from tuning.simulate.workloads.workload import Ask, Stream


@dataclass(frozen=True, kw_only=True)
class Agents:
    """`users` users have `rounds` sessions each, one after the other. A session has 1 to twice `turns` - 1 turns.

    A turn adds a completion of `response` and what a tool says, `tool`, after `tool_s` seconds on average. A session
    ends where the next turn would not fit into `max_context` tokens.
    """

    users: int
    rounds: int
    turns: int
    first: LogNormal
    response: LogNormal
    tool: LogNormal
    tool_s: float
    max_context: int
    reports_ends: bool = False
    """True if a client reports the end of each session to the gateway."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` where a session's first turn may not fit."""
        first = self.first.longest + self.response.longest
        if first > self.max_context:
            raise ConfigError(
                f"--max-context {self.max_context}: the first turn of a session takes up to {first} tokens "
                f"(--first and --turn at their longest); give {first} or more"
            )

    def stream(self, seed: int) -> Stream:
        return [[self._user(user, Random(f"agents {seed} {user}")) for user in range(self.users)]]

    def _user(self, user: int, draw: Random) -> list[Ask]:
        return [ask for session in range(self.rounds) for ask in self._session(f"agent-{user}-{session}", draw)]

    def _session(self, name: str, draw: Random) -> list[Ask]:
        turns, context, known, asks = draw.randint(1, 2 * self.turns - 1), self.first.drawn(draw), 0, list[Ask]()
        for turn in range(turns):
            tokens = self.response.drawn(draw)
            if context + self.response.longest > self.max_context:
                break
            asks.append(
                Ask(
                    request=f"{name}-{turn}", text=hash((name, turn)), prefix=name, prompt=context, lengths=(tokens,),
                    limit=self.response.longest, session=name, known=known,
                    after_s=draw.expovariate(1 / self.tool_s) if turn and self.tool_s else 0.0,
                )
            )  # fmt: skip
            known = context + tokens
            context = known + self.tool.drawn(draw)
        if self.reports_ends:
            asks[-1] = replace(asks[-1], is_last=True)
        return asks
