"""Tokens that engines have read and made for a request with a limit, to charge where its client leaves before it has
them. A request that is delivered is charged by its reply's usage instead."""

from collections.abc import Callable
from contextvars import ContextVar


class Tally:
    """The tokens of one request so far. Whole replies count once they have arrived, chunks as they come."""

    def __init__(self, charge: Callable[[int], None]) -> None:
        self._charge = charge
        self._tokens = 0
        self.is_with_batch = False
        """True where a batch of the request runs on for a replay: it charges, unless a replay is charged."""

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def charge(self) -> None:
        """Charge all tokens so far."""
        self._charge(self._tokens)


TALLY: ContextVar[Tally | None] = ContextVar("TALLY", default=None)
"""The tally of the request under way; None without limits."""
