"""The attempts of the last rollouts: when each waited and ran, on which replica and weights, and how it ended."""

import time

from msgspec import Struct

from engines.engine import Json
from engines.errors import EngineError
from engines.trace_context import TRACE_CONTEXT, TRACEPARENT
from gateway.fleet.placement.attempts import End, end_of
from gateway.fleet.placement.routing import Recent, Rollout
from gateway.fleet.replica import Replica

KEPT = 4096
_ATTEMPTS_KEPT = 64
_NOT_PLACED: Json = {
    "queued": None, "placed": None, "ended": None, "replica": None, "weight_versions": (), "end": None, "error": None,
}  # fmt: skip
# What the dialects put before a request's id in their replies.
_PREFIXES = ("cmpl-", "chatcmpl-")


class RolloutHistory(Struct, eq=False):
    """One rollout and the reports of its attempts. The rest of a sample that was cut off is a rollout of its own."""

    rollout: Rollout
    traceparent: str | None
    attempts: list[Json] = []

    def report(self) -> Json:
        rollout = self.rollout
        return {
            "rollout": rollout.request_id,
            "model": rollout.model,
            "adapter": rollout.adapter and rollout.adapter.name,
            "samples": rollout.n,
            "prompt_tokens": rollout.prompt_tokens,
            "session": rollout.session or None,
            "goes_on": rollout.goes_on,
            "traceparent": self.traceparent,
            "attempts": self.attempts,
        }


class AttemptHistory:
    """The last 4,096 rollouts, in memory."""

    def __init__(self) -> None:
        self._rollouts = Recent[str, RolloutHistory](KEPT)

    def begin(self, rollout: Rollout) -> Json:
        """Record an attempt, which begins with the wait for a replica. Times are of day, in seconds; the versions are
        those of the replica at its start and end."""
        found = self._rollouts.get(rollout.request_id)
        # A client may use an id again; the rest of a stream has the id of its beginning.
        if found is None or not (found.rollout is rollout or rollout.goes_on):
            found = RolloutHistory(rollout, TRACE_CONTEXT.get().get(TRACEPARENT))
            self._rollouts.note(rollout.request_id, found)
        attempt = {**_NOT_PLACED, "queued": time.time()}
        found.attempts.append(attempt)
        del found.attempts[:-_ATTEMPTS_KEPT]
        return attempt

    def place(self, attempt: Json, replica: Replica) -> None:
        """Note the replica that has taken the rollout."""
        placed = {"replica": replica.info.replica_id, "placed": time.time()}
        attempt |= {**placed, "weight_versions": [replica.weight_version]}

    def end(self, attempt: Json, replica: Replica | None, error: BaseException | None) -> None:
        """Note the end of an attempt; `error` has ended it."""
        attempt["ended"] = time.time()
        if replica is not None:
            attempt["weight_versions"].append(replica.weight_version)
        if error is None:
            attempt["end"] = End.ANSWERED
            return
        cuts_off = replica is not None and isinstance(error, EngineError) and replica.is_cut_off(error)
        attempt["end"] = end = end_of(error, cuts_off=cuts_off)
        if end is not End.LEFT:
            attempt["error"] = str(error) or repr(error)

    def of(self, name: str) -> list[Json]:
        """Return the rollouts of a request by its id, as the client sent it or as a reply has it, oldest first."""
        request = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
        return [
            found.report()
            for name, found in self._rollouts.items()
            if name == request or name.startswith(f"{request}-")
        ]
