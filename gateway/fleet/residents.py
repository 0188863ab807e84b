"""The sessions whose KV one replica holds, also while they wait for their tools."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.fleet.pace import Pace


@dataclass(eq=False, slots=True)
class Session:
    """The turns of one agent. `home` is the id of the replica of its last turn; `residents`, where they have it, hold
    its KV.

    `context` are the tokens of its last turn, prompt and reply; 0 before its first has ended. `at_work` counts turns
    that wait or run. `quiet_since` is the monotonic time of the end of its last turn. `is_over` is True once its client
    has said so.
    """

    home: str | None = None
    context: int = 0
    at_work: int = 0
    quiet_since: float = 0.0
    is_over: bool = False
    residents: "Residents | None" = field(default=None, repr=False)


class Residents:
    """The residents of one replica, and the tokens that they need.

    `capacity` is the number of tokens whose KV the engine can hold; None where it is unknown. `pace` tells what reading
    them again costs. `idle_tokens` are those of residents that wait for their tools.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.pace = Pace()
        self.tokens = 0
        self.idle_tokens = 0
        self._tokens: dict[Session, int] = {}
        self._idle: OrderedDict[Session, None] = OrderedDict()
        self._version: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def longest_idle(self) -> Session | None:
        """The session that waits longest for its tool, which an engine evicts first."""
        return next(iter(self._idle), None)

    def look(self, version: int | None, ended: float) -> None:
        """Let idle sessions go that are held in vain: of other weights than the replica has now, whose KV no turn can
        use, or quiet since `ended` (monotonic) or longer."""
        if version != self._version:
            self._version, ended = version, math.inf
        if self._idle:
            self.let_idle_go(ended)

    def let_idle_go(self, ended: float = math.inf) -> None:
        """Let sessions go that have waited for their tools since `ended` (monotonic) or longer."""
        while (session := self.longest_idle) is not None and session.quiet_since <= ended:
            self.let_go(session)

    def hold(self, session: Session, tokens: int) -> None:
        """Hold a session at its present size, in place of another replica's residents."""
        if session.residents is not self:
            if session.residents is not None:
                session.residents.let_go(session)
            session.residents = self
        grown = tokens - self._tokens.get(session, 0)
        self._tokens[session] = tokens
        self.tokens += grown
        if session in self._idle:
            self.idle_tokens += grown

    def let_go(self, session: Session) -> None:
        """Forget a session: its KV may be evicted."""
        self.wake(session)
        self.tokens -= self._tokens.pop(session)
        session.residents = None

    def rest(self, session: Session) -> None:
        """Note that a session waits for its tool from now on."""
        self._idle[session] = None
        self.idle_tokens += self._tokens[session]

    def wake(self, session: Session) -> None:
        """Note that a turn of a session has come."""
        if session in self._idle:
            del self._idle[session]
            self.idle_tokens -= self._tokens[session]

    def shrink(self, limit: float) -> None:
        """Let sessions go that wait for their tools, the longest idle first, until the others fit."""
        while self.tokens > limit and (session := self.longest_idle) is not None:
            self.let_go(session)
