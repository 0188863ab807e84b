"""Probes of replicas: their times, and the evidence that a failed one is."""

import asyncio
import time
from collections.abc import Callable, Sequence

from engines.errors import DeadlineExceeded, EngineError, EngineGone, EngineUnreachable
from engines.types import EngineKind
from gateway.config.schema import FleetConfig
from gateway.fleet.replica import Replica
from gateway.fleet.watch.evidence import Failure


class Probes:
    """Looks at replicas, and judges a silence. `serving` returns the replicas that serve a model."""

    def __init__(self, config: FleetConfig, serving: Callable[[str], Sequence[Replica]]) -> None:
        self._config = config
        self._serving = serving
        self._shared: dict[Replica, asyncio.Task[Failure | None]] = {}

    async def probe(self, replica: Replica) -> Failure | None:
        """Ask an engine for its health. Return the reason why it did not answer well."""
        try:
            await replica.engine.health(self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            replica.evidence.failure = error
            return error
        replica.evidence.answered()
        return None

    async def shared_probe(self, replica: Replica) -> Failure | None:
        """Probe an engine once for all that ask at the same time."""
        if replica not in self._shared:
            task = asyncio.create_task(self.probe(replica), name=f"examine {replica.replica_id}")
            task.add_done_callback(lambda _: self._shared.pop(replica, None))
            self._shared[replica] = task
        return await asyncio.shield(self._shared[replica])

    async def probe_broken(self, replica: Replica) -> Failure | None:
        """Probe an engine whose connection broke; twice where that of the probe breaks too: a listener that closes
        resets what waits in its queue, and nothing listens at the next try."""
        failure = await self.shared_probe(replica)
        is_gone = isinstance(failure, EngineGone)
        if isinstance(failure, EngineUnreachable) and not is_gone and failure.retry_after_s is None:
            return await self.shared_probe(replica)
        return failure

    def is_evidence(self, replica: Replica, failure: Failure) -> bool:
        """True where a failed look speaks against a replica: a late answer does so after a silence without tokens."""
        is_late = isinstance(failure, DeadlineExceeded)
        return not is_late or time.monotonic() - replica.evidence.answered_at >= self.moves_after_s(replica)

    def moves_after_s(self, replica: Replica) -> float:
        """Silence after which a replica is SUSPECT, and its rollouts move to others.

        Where most others were heard of within the time of a probe, this process and its host do not stand still, and
        that time is enough.
        """
        others = [other for other in self._serving(replica.info.model) if other is not replica]
        heard = sum(time.monotonic() - other.evidence.answered_at < self._config.probe_timeout_s for other in others)
        longest_s = self._config.stalled_after_s
        return min(longest_s, self._config.probe_timeout_s) if 2 * heard > len(others) else longest_s

    def is_lost(self, replica: Replica, failure: Failure | None) -> bool:
        """True where Serve no longer lists it and it does not answer, or where its port is closed.

        A closed port is enough for our own engines: a successor takes another port. An external server may come back.
        """
        has_ended = isinstance(failure, EngineGone) and replica.info.kind is not EngineKind.EXTERNAL
        since = replica.evidence.suspect_since
        if since is not None and replica.evidence.is_stalled:
            since = max(since, replica.evidence.answered_at)  # a stalled engine that answers its probes may recover
        is_overdue = since is not None and time.monotonic() - since > self._config.lost_after_s
        return has_ended or is_overdue or (failure is not None and not replica.evidence.is_listed)
