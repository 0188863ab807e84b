"""The attempts of the last rollouts: when each waited and ran, on which replica and weights, and how it ended."""

import time
from collections import OrderedDict
from collections.abc import Mapping

from msgspec import Struct, field

from engines.engine import Json
from engines.errors import EngineError
from engines.trace_context import TRACE_CONTEXT, TRACEPARENT
from gateway.fleet.placement.attempts import End, end_of
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.waiting import Cause
from gateway.fleet.replica import Replica

KEPT = 4096
_ATTEMPTS_KEPT = 64
_SHORTEST_S = 0.001
_OF_PLACEMENT = ("queued", "placed", "ended", "replica", "why", "waited_s", "end")
# What the dialects put before a request's id in their replies.
_PREFIXES = ("cmpl-", "chatcmpl-")


class Attempt(Struct, eq=False):
    """One attempt. Times are of day, in seconds; `versions` are the replica's at the attempt's start and end.

    `why` is the reason for its replica, and `waited` has the seconds in line by cause.
    """

    queued: float = field(default_factory=time.time)
    replica: Replica | None = None
    placed: float | None = None
    ended: float | None = None
    versions: list[int | None] = []
    end: End | None = None
    error: str = ""
    why: str = ""
    waited: Mapping[Cause, float] = {}

    def place(self, replica: Replica) -> None:
        """Note the replica that has taken the rollout."""
        self.replica, self.placed = replica, time.time()
        self.versions.append(replica.weight_version)

    def finish(self, error: BaseException | None) -> None:
        """Note the end; `error` has ended it."""
        self.ended, replica = time.time(), self.replica
        if replica is not None:
            self.versions.append(replica.weight_version)
        if error is None:
            self.end = End.CUT_OFF if replica is not None and replica.cuts_off else End.ANSWERED
            return
        cuts_off = replica is not None and isinstance(error, EngineError) and replica.is_cut_off(error)
        self.end = end_of(error, cuts_off=cuts_off)
        self.error = "" if self.end is End.LEFT else str(error) or repr(error)

    def report(self) -> Json:
        return {
            "queued": self.queued,
            "placed": self.placed,
            "ended": self.ended,
            "replica": self.replica and self.replica.replica_id,
            "weight_versions": self.versions,
            "why": self.why or None,
            "waited_s": {str(cause): seconds for cause, seconds in self.waited.items() if seconds >= _SHORTEST_S},
            "end": self.end,
            "error": self.error or None,
        }


class RolloutHistory(Struct, eq=False):
    """One rollout and its attempts. The rest of a sample that was cut off is a rollout of its own."""

    rollout: Rollout
    traceparent: str | None
    attempts: list[Attempt] = []

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
            "attempts": [attempt.report() for attempt in self.attempts],
        }


class AttemptHistory:
    """The last 4,096 rollouts, in memory."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[tuple[str, str], RolloutHistory] = OrderedDict()

    def begin(self, rollout: Rollout) -> Attempt:
        """Record an attempt, which begins with the wait for a replica."""
        key = rollout.owner, rollout.request_id
        found = self._rollouts.get(key)
        # A client may use an id again; the rest of a stream has the id of its beginning.
        if found is None or not (found.rollout is rollout or rollout.goes_on):
            found = RolloutHistory(rollout, TRACE_CONTEXT.get().get(TRACEPARENT))
            self._rollouts[key] = found
            self._rollouts.move_to_end(key)
            if len(self._rollouts) > KEPT:
                self._rollouts.popitem(last=False)
        found.attempts.append(attempt := Attempt())
        del found.attempts[:-_ATTEMPTS_KEPT]
        return attempt

    def of(self, name: str) -> list[Json]:
        """Return the rollouts of a request by its id, as the client sent it or as a reply has it, oldest first."""
        request = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
        return [
            found.report()
            for (_, key), found in self._rollouts.items()
            if key == request or key.startswith(f"{request}-")
        ]

    def placements_of(self, owner: str, name: str) -> list[Json]:
        """Return where the rollouts of a submission went and why, without what only an administrator may see."""
        return [
            {
                "rollout": found.rollout.request_id,
                "attempts": [
                    {key: told for key, told in attempt.report().items() if key in _OF_PLACEMENT}
                    for attempt in found.attempts
                ],
            }
            for found in self._rollouts.values()
            if (found.rollout.owner, found.rollout.request) == (owner, name)
        ]
