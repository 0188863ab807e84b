"""Requests that any engine of a model can answer: replicas are asked in turn until one of them does."""

from collections.abc import Sequence
from weakref import WeakSet

import structlog

from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.attempts import End, end_of
from gateway.fleet.replica import Replica

log = structlog.get_logger()


class AnyReplica:
    """Asks for what engines know: token ids of a text, a message parsed from tokens, a model's card."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._silent: WeakSet[Replica] = WeakSet()  # gave no answer the last time

    async def ask(
        self, replicas: Sequence[Replica], method: str, path: str, body: Json | None, timeout_s: float
    ) -> Json:
        """Return the first answer of these replicas, at least one. Each has `timeout_s`.

        They are asked in their order; those that gave no answer the last time come last. Raise the `EngineRefused` of
        a request that others would refuse too, else the error of the last replica.
        """
        starts = self._fleet.starts.text
        failure: EngineError | DeadlineExceeded = DeadlineExceeded(f"no replica to ask for {path}: see /health{starts}")
        for replica in sorted(replicas, key=self._silent.__contains__):
            try:
                call = replica.engine.ask(method, path, body, timeout_s)
                answer = await replica.unless_lost(call, is_control=True)
            except (EngineError, DeadlineExceeded) as error:
                failure = error
                await self._failed(replica, path, error)
            else:
                self._silent.discard(replica)
                return answer
        raise failure

    async def _failed(self, replica: Replica, path: str, error: EngineError | DeadlineExceeded) -> None:
        """Note that a replica gave no answer. Raise the error if it is one."""
        if isinstance(error, EngineError):
            if end_of(error, cuts_off=False) is End.REFUSED:
                raise error
            await self._fleet.examine(replica, error)
        self._silent.add(replica)
        log.warning("a replica does not answer", replica=replica.replica_id, path=path, error=str(error))
