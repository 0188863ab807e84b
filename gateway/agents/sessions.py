"""All sessions of a gateway: found by owner and id, kept within bounds, acked, and brought over a restart."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

import structlog

from engines.engine import Json
from engines.errors import SessionFrozen, TooManyRequests, UnknownRequest
from gateway.agents.session import Head, Session, read_head, read_steps
from gateway.config.schema import SessionsConfig
from gateway.fleet.metrics import Metrics
from gateway.ledger.folder import Left
from gateway.ledger.ledger import Ledger, Record

log = structlog.get_logger()

KIND = "session"
_BOUNDS_S = 1.0
_MAX_AGE_S = 86_400.0
"""Longest time without a call, a reward or a read after which a session is forgotten."""
_ACKED_KEPT = 10_000
_FULL_RETRY_S = 10.0

Key = tuple[str, str]  # owner and id


class Sessions:
    """The sessions, by owner and id. The bounds are `gateway.sessions`."""

    kind = KIND

    def __init__(self, config: SessionsConfig, ledger: Ledger, metrics: Metrics) -> None:
        self._config = config
        self._ledger = ledger
        ledger.add(self)
        self._metrics = metrics
        self._kept: dict[Key, Session] = {}
        self._acked: OrderedDict[Key, None] = OrderedDict()
        self._full: set[str] = set()  # owners

    @property
    def is_durable(self) -> bool:
        """True if sessions outlive the gateway."""
        return self._ledger.is_durable

    def report(self) -> Json:
        """The state for /status."""
        kept = self._kept.values()
        return {
            "sessions": len(kept),
            "session_bytes": sum(one.num_bytes for one in kept),
        }

    # Agents

    def entered(self, owner: str, name: str) -> Session:
        """Return the session of a call, which may begin it. Raise `SessionFrozen`, `TooManyRequests`."""
        if (owner, name) in self._acked:
            raise SessionFrozen(f"session is frozen: {name!r} was acked, and takes no call any more")
        if owner in self._full:
            raise TooManyRequests(
                f"open sessions of this key fill gateway.sessions.max_bytes = {self._config.max_bytes}: freeze and "
                "ack those that have ended, or raise it",
                _FULL_RETRY_S,
            )
        session, _ = self.begun(owner, name)
        session.check_open()
        return session

    # Trainers

    def begun(self, owner: str, name: str, metadata: Json | None = None) -> tuple[Session, bool]:
        """Return the session of this id, and True where it begins here."""
        if (found := self._kept.get((owner, name))) is not None:
            return found, False
        self._acked.pop((owner, name), None)
        session = Session(Head(owner, name, time.time(), metadata), Record.new(self._ledger, KIND), self._metrics)
        self._kept[owner, name] = session
        session.write()
        return session, True

    def find(self, owner: str, name: str) -> Session:
        """Return a session. Raise `UnknownRequest`."""
        if (found := self._kept.get((owner, name))) is not None:
            found.used_at = time.monotonic()
            return found
        raise UnknownRequest(
            f"no session {name!r} of this key: it has had no call, was acked, or was forgotten (see "
            "gateway.sessions and gateway.ledger)",
            param="id",
        )

    def of(self, owner: str) -> list[Session]:
        """Return the sessions of an owner, the oldest first."""
        return sorted((one for one in self._kept.values() if one.head.owner == owner), key=lambda one: one.head.began)

    async def ack(self, owner: str, name: str) -> None:
        """Drop a session that was frozen. Return once that is durable. Raise `SessionFrozen` where it is open."""
        if (owner, name) not in self._acked:
            session = self.find(owner, name)
            if not session.head.is_frozen or session.open:
                raise SessionFrozen(f"{name!r} is open: freeze it before it is acked, since later calls would be lost")
            self._drop(session)
        await self._ledger.written()

    async def delete(self, owner: str, name: str) -> None:
        """End the calls of a session, and drop it. Return once that is durable."""
        session = self.find(owner, name)
        await session.freeze(0.0)
        self._drop(session)
        await self._ledger.written()

    def _drop(self, session: Session) -> None:
        """Forget a session but for its name, so that a late call does not begin it again."""
        self._kept.pop(session.key, None)
        self._acked[session.key] = None
        if len(self._acked) > _ACKED_KEPT:
            self._acked.popitem(last=False)
        session.record.remove()

    # Bounds

    async def run(self) -> None:
        """Keep bounds."""
        while True:
            await asyncio.sleep(_BOUNDS_S)
            self._keep_bounds()

    async def close(self) -> None:
        """End open calls with what they have: no later gateway goes on with them."""
        ending = (one.stop_calls("gateway_ended", 0.0) for one in self._kept.values())
        await asyncio.gather(*ending, return_exceptions=True)

    def _keep_bounds(self) -> None:
        now = time.monotonic()
        for session in list(self._kept.values()):
            if now - session.used_at > _MAX_AGE_S and not session.open:
                self._forget(session, f"not used for {_MAX_AGE_S:g} s")
        self._full = {owner for owner in {owner for owner, _ in self._kept} if not self._fits(owner)}

    def _fits(self, owner: str) -> bool:
        """Forget sessions without open calls, the least recently used first, until the others fit. False if they never
        do."""
        kept, limit = self.of(owner), self._config.max_bytes
        size = sum(one.num_bytes for one in kept)
        for session in sorted((one for one in kept if not one.open), key=lambda one: one.used_at):
            if size > limit:
                size -= session.num_bytes
                self._forget(session, f"gateway.sessions.max_bytes = {limit}")
        return size <= limit

    def _forget(self, session: Session, reason: str) -> None:
        tokens = session.num_tokens["sampled"]
        log.warning("a session is forgotten that was not acked", id=session.head.id, reason=reason, tokens=tokens)
        del self._kept[session.key]
        session.record.remove()

    # Ledger

    def bring_back(self, left: Sequence[Left]) -> None:
        for one in left:
            record = Record(self._ledger, one.name)
            try:
                session = Session(read_head(one.frames[0]), record, self._metrics)
                session.restore(chain.from_iterable(map(read_steps, one.frames[1:])))
                self._kept[session.key] = session
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                log.error("a session in the ledger cannot be read", record=one.name, error=repr(error))
                record.remove()
