"""Sessions, the turns of agents: the replica that holds the prefix of each, and admission by the KV that they need.

Routing prefers that replica, unless it is overloaded. An engine that has to hold more contexts than fit evicts one for
the other, and reads each again at its next turn. So a session counts against its replica's KV capacity as long as it
lives, and where there is no room its turn waits until there is, if that costs less than reading a context again.
"""

import hashlib
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, TypeVar

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.fleet.placement.routing import ReplicaView, Rollout
from gateway.fleet.residents import Residents, Session

# vLLM's name first, then the one that SGLang's router reads.
_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
# The more exact field first: one user may have many conversations.
_OPENAI_FIELDS = ("prompt_cache_key", "user")
_MAX_LENGTH = 256
_REMEMBERED = 100_000
# The share of the context of the session that waits longest for its tool that is read again if it is evicted: it may
# have ended, and an engine evicts no more than it needs, from the end. Of 1/3, 1/2, 0.7 and 1, a half has the best
# times over agents of long and of short replies.
_READ_AGAIN = 1 / 2
# A session is idle for so many times the mean time of a tool before it counts no longer.
_GAPS = 3.0
# With the whole mean as the least, sessions would count with more than they have on average.
_SHARE_OF_MEAN = 0.7
# Turns over which contexts and the times of tools are averaged.
_LEARNED_FROM = 200
_SOON_S = 0.01
_FORGOTTEN_AT_ONCE = 16


class Host(ReplicaView, Protocol):
    """The part of a replica that admission sees."""

    @property
    def residents(self) -> Residents: ...


H = TypeVar("H", bound=Host)


class _Mean:
    """The mean of the last values; None before the first."""

    def __init__(self) -> None:
        self._count = 0
        self.value: float | None = None

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, _LEARNED_FROM)
        before = value if self.value is None else self.value
        self.value = before + (value - before) / self._count


class Sessions:
    """Sessions by model and name. The least recently used are forgotten beyond `limit`.

    `share` is the share of a replica's KV up to which sessions are admitted; None admits all. A session counts no more
    once it has been idle for `idle_s`, or for three times the mean time between two turns of a session: sessions of one
    turn count only while it runs.
    """

    def __init__(self, share: float | None = None, idle_s: float = math.inf, limit: int = _REMEMBERED) -> None:
        self._share = share
        self._idle_s = idle_s
        self._limit = limit
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._contexts: defaultdict[str, _Mean] = defaultdict(_Mean)
        self._replies: defaultdict[str, _Mean] = defaultdict(_Mean)
        self._gaps: defaultdict[str, _Mean] = defaultdict(_Mean)

    def __len__(self) -> int:
        return len(self._sessions)

    def home(self, model: str, name: str) -> str | None:
        """Id of the replica that has the session's prefix; None for a new session and for no session."""
        session = self._sessions.get((model, name)) if name else None
        return session.home if session else None

    @contextmanager
    def turn(self, rollout: Rollout, ended: Callable[[str], None]) -> Iterator[None]:
        """Keep the session of a rollout at work during the block. `ended` gets its model after it."""
        session = self._of(rollout)
        if session.context and not session.at_work and not rollout.goes_on:  # a rest has no tool before it
            self._gaps[rollout.model].add(min(time.monotonic() - session.quiet_since, self._idle_s))
        session.at_work += 1
        session.is_over = False
        if session.residents is not None:
            session.residents.wake(session)
        try:
            yield
        finally:
            session.at_work -= 1
            session.quiet_since = time.monotonic()
            if not session.at_work and session.residents is not None:
                session.residents.rest(session)
            if session.is_over:
                self._end((rollout.model, rollout.session))
            ended(rollout.model)

    def is_outside(self, rollout: Rollout) -> bool:
        """True for a turn whose session no replica holds, and which has to be admitted. The rest of a rollout was."""
        if not rollout.session or self._share is None or rollout.goes_on:
            return False
        return self._of(rollout).residents is None

    def has_begun(self, rollout: Rollout) -> bool:
        """True for a turn after a session's first."""
        return bool(self._of(rollout).context)

    def admission(self, rollout: Rollout) -> Callable[[Iterable[H]], list[H]] | None:
        """A filter of replicas: those that hold the session of a rollout, or may hold it; None if each may."""
        if self._share is None or not rollout.session or rollout.goes_on:
            return None
        session, share = self._of(rollout), self._share
        needed, ended = self._needed(session, rollout), time.monotonic() - self._patience_s(rollout.model)
        cost, held_by = self._cost_of_eviction(rollout.model), session.residents

        def admitting(hosts: Iterable[H]) -> list[H]:
            return [
                host
                for host in hosts
                if (residents := host.residents) is held_by
                or residents.capacity is None
                or residents.tokens + needed <= share * residents.capacity
                or not residents.tokens  # a session that fits nowhere runs alone
                or not host.load_samples
                or _gains(host, share * residents.capacity - needed, ended, cost)
            ]

        return admitting

    def _cost_of_eviction(self, model: str) -> float:
        """Tokens that are read again for each token of a turn admitted without room; 0 before they are known."""
        context, reply = self._contexts[model].value or 0.0, self._replies[model].value or 0.0
        return _READ_AGAIN * context / max(1.0, reply)

    def holder(self, rollout: Rollout, hosts: Iterable[H]) -> H | None:
        """The replica that holds the session of a rollout."""
        session = self._sessions.get((rollout.model, rollout.session))
        if session is None or session.residents is None:
            return None
        return next((host for host in hosts if host.residents is session.residents), None)

    def give_up(self, rollout: Rollout) -> None:
        """Note that no replica holds the session of a rollout, which waits to be admitted: it would wait for itself."""
        session = self._of(rollout)
        if session.residents is not None:
            session.residents.let_go(session)

    def settle(self, rollout: Rollout, host: Host) -> None:
        """Remember where the session's newest turn was placed, and hold it there."""
        if not rollout.session:
            return
        session, residents = self._of(rollout), host.residents
        session.home = host.replica_id
        if self._share is not None:
            residents.look(host.weight_version, -math.inf)
            residents.hold(session, self._needed(session, rollout))
            residents.shrink(self._share * (residents.capacity or math.inf))

    def delivered(self, rollout: Rollout, prompt_tokens: int, completion_tokens: int) -> None:
        """Note the context that a turn has left. `completion_tokens` are those of all its samples."""
        session = self._sessions.get((rollout.model, rollout.session)) if rollout.session else None
        if session is None:
            return
        session.context = prompt_tokens + completion_tokens // rollout.n
        self._contexts[rollout.model].add(session.context)
        self._replies[rollout.model].add(completion_tokens / rollout.n)
        residents = session.residents
        if residents is not None:
            residents.hold(session, self._needed(session, rollout))
            residents.shrink(residents.capacity or math.inf)

    def finish(self, models: Iterable[str], name: str) -> bool:
        """End the sessions of this name, those at work after their turn. False where none is known."""
        found = [key for model in models if (key := (model, name)) in self._sessions]
        for key in found:
            self._end(key)
        return bool(found)

    def next_end_s(self, model: str, hosts: Iterable[Host]) -> float:
        """Seconds until one of the sessions that these replicas hold has been idle for too long; infinite for none."""
        idle = [host.residents.longest_idle for host in hosts if host.residents.idle_tokens]
        idle_s = self._patience_s(model)
        ends = [session.quiet_since + idle_s for session in idle if session is not None]
        return max(_SOON_S, min(ends, default=math.inf) - time.monotonic())

    def _of(self, rollout: Rollout) -> Session:
        """The session of a rollout, which is the most recently used now."""
        key = (rollout.model, rollout.session)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session()
            self._forget_oldest()
        else:
            self._sessions.move_to_end(key)
        return session

    def _forget_oldest(self) -> None:
        """Forget sessions beyond the limit. A session at work is in use, however long ago its turn came."""
        for key in list(islice(self._sessions, _FORGOTTEN_AT_ONCE)) if len(self._sessions) > self._limit else ():
            if self._sessions[key].at_work:
                self._sessions.move_to_end(key)
            elif len(self._sessions) > self._limit:
                self._end(key)

    def _needed(self, session: Session, rollout: Rollout) -> int:
        """Tokens that a session counts with: its context, or a share of the mean context over the lives of all sessions
        if that is more, since a short one grows."""
        mean = self._contexts[rollout.model].value or 0.0
        return max(session.context, rollout.prompt_tokens, int(_SHARE_OF_MEAN * mean))

    def _patience_s(self, model: str) -> float:
        """Seconds without a turn after which a session of a model counts no longer."""
        return min(self._idle_s, _GAPS * (self._gaps[model].value or 0.0))

    def _end(self, key: tuple[str, str]) -> None:
        """Forget a session; one at work at the end of its turn."""
        session = self._sessions[key]
        session.is_over = True
        if session.at_work:
            return
        del self._sessions[key]
        if session.residents is not None:
            session.residents.let_go(session)


def _gains(host: Host, left: float, ended: float, cost: float) -> bool:
    """True where a session has room once others have gone, or gains more than it costs without.

    A sample more takes part in steps that are made in any case, instead of in steps of its own: with `n` samples it
    gains a step for each `n` of its tokens. An evicted context costs the time to read it again.
    """
    residents = host.residents
    residents.look(host.weight_version, ended)
    return residents.tokens <= max(0.0, left) or cost < residents.pace.step_tokens / host.load_samples


def name_of_client(client: str, name: str) -> str:
    """Return the name of a request or session of this client alone: two clients may choose the same one."""
    return f"{name}-{hashlib.blake2b(client.encode(), digest_size=4).hexdigest()}"


def session_key(client: str, name: str) -> str:
    """The name under which a client's session is remembered: a long one is hashed."""
    if len(name) > _MAX_LENGTH:
        name = hashlib.blake2b(name.encode(errors="surrogateescape")).hexdigest()
    return name_of_client(client, name)


def session_of(client: str, headers: Mapping[str, str], body: Json) -> str:
    """The session that a client's request belongs to, as `session_key`; empty without one. Raises `InvalidRequest`.

    The order is vLLM's: the field of the body, headers, vllm_xargs; OpenAI's fields come last.
    """
    xargs = body.get("vllm_xargs")
    named: dict[str, Any] = {
        "session_id": body.get("session_id"),
        **{header: headers.get(header) for header in _HEADERS},
        "vllm_xargs.session_id": xargs.get("session_id") if isinstance(xargs, dict) else None,
        **{field: body.get(field) for field in _OPENAI_FIELDS},
    }
    for name, value in named.items():
        if value in (None, ""):
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} = {shown(value)} must be text", param=name)
        return session_key(client, value)
    return ""
