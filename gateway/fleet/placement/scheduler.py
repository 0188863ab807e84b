"""Places rollouts on replicas, and makes their attempts.

A model has one line of waiting rollouts. The gate holds back the policy's rollouts while a weight update or a pause has
closed it.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog

from engines.engine import Json
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineFailed,
    EngineGone,
    EngineUnreachable,
)
from engines.types import EngineKind, ReplicaState
from gateway.config.schema import GatewayConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.attempt_history import AttemptHistory
from gateway.fleet.placement.attempts import RETRIED, End, end_of
from gateway.fleet.placement.routing import Lengths, Recent, Rollout, choose
from gateway.fleet.placement.waiting import Queue, SchedulingPass, Waiter, WaitingLine
from gateway.fleet.replica import Replica
from gateway.fleet.watch.evidence import Backoff

log = structlog.get_logger()

# Engines that die at once are all known to be dead after this time, and a prompt does not meet two of them.
_AFTER_DEATH_S = 1.0
_FAULT = 500
_OTHER: Json = {"prompt": [1], "max_tokens": 1}
_OTHER_TIMEOUT_S = 10.0
_PATIENCE_CHECKED_EACH_S = 1.0
_EARLY_S = 0.005  # a timer of uvloop may come a millisecond before its time


async def _serves_others(replica: Replica) -> bool:
    """True if the engine makes a token for another request: it is neither dying nor in an update."""
    try:
        await replica.unless_lost(replica.engine.generate("/v1/completions", _OTHER, _OTHER_TIMEOUT_S))
    except (EngineError, DeadlineExceeded):
        return False
    return replica.can_serve


class Scheduler:
    """Runs each rollout on one replica after the other, until one delivers or there may be no further attempt.

    Requests take turns among the rollouts of one model; models never wait for each other.

    Nothing of the policy is placed while the gate is closed; running rollouts continue.
    """

    def __init__(self, config: GatewayConfig, fleet: Fleet, metrics: Metrics) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        for end in RETRIED:
            metrics.retries.labels(end)  # so that each is on the page from the start
        self._lines: defaultdict[str, WaitingLine] = defaultdict(WaitingLine)
        self._closed_for: set[str] = set()
        self._homes = Recent[tuple[str, str], str]()
        """The replica of each session's last turn, by model and name."""
        self._watched_lines: set[str] = set()
        self._to_look_at: set[str] = set()
        self.lengths = Lengths()
        """The expected lengths of samples by their prompts."""
        self.history = AttemptHistory()
        fleet.on_change(self._pump_all)

    def queue_length(self, model: str) -> int:
        return len(self._lines[model])

    def samples(self, group: str) -> int:
        """Samples of an engine group's model that are in line or in flight."""
        model = self._fleet.models.groups[group].served_name
        return self._lines[model].samples + sum(one.load_samples for one in self._fleet.alive_of(model))

    @property
    def closed_for(self) -> list[str]:
        """The reasons why nothing of the policy is placed now; empty when the gate is open."""
        return sorted(self._closed_for)

    def close_gate(self, reason: str) -> None:
        self._closed_for.add(reason)

    def open_gate(self, reason: str) -> None:
        self._closed_for.discard(reason)
        self._pump_all()

    async def run(
        self, rollout: Rollout, call: Callable[[Replica], Awaitable[None]], kept: Callable[[EngineError], bool]
    ) -> None:
        """Have the call made with one replica after the other, until it succeeds, or `kept` is True: it has failed then
        with something that continues elsewhere."""
        while True:
            attempt, replica = self.history.begin(rollout), None
            ended_by: BaseException | None = None
            try:
                replica = await self._place(rollout)
                self.history.place(attempt, replica)
                await replica.unless_lost(call(replica))
                replica.backoff.succeeded()
                return
            except EngineError as error:
                failure = ended_by = error
            except BaseException as error:
                ended_by = error
                raise
            finally:
                if replica is not None:
                    replica.release(rollout, ended_by)
                    self._pump(rollout.model)
                self.history.end(attempt, replica, ended_by)
            assert replica is not None  # the wait for one raises no `EngineError`
            progressed = kept(failure)
            await self._failed(rollout, replica, failure, progressed=progressed)
            if progressed:
                return

    async def _failed(self, rollout: Rollout, replica: Replica, error: EngineError, *, progressed: bool) -> None:
        """Record the end of an attempt. Raises if there may be no further attempt.

        The rest of a sample is refused by this replica alone: another has taken the whole request.
        """
        end = end_of(error, cuts_off=replica.is_cut_off(error))
        if end is End.CUT_OFF and isinstance(error, EngineUnreachable):
            end = rollout.attempts.lost_in_update()
        if end is End.REFUSED and not rollout.goes_on:
            raise error
        self._metrics.retries.labels(end).inc()
        if end is End.CUT_OFF:
            return
        is_dead = await self._judge(rollout, replica, end, error)
        if end in (End.FAILED, End.REFUSED):
            if isinstance(error, EngineFailed) and error.status == _FAULT and not rollout.goes_on:
                rollout.attempts.faults += await _serves_others(replica)
            died = is_dead and not isinstance(error, EngineGone)  # else it was dead before it got the prompt
            rollout.attempts.failed(replica.replica_id, replica.info.incarnation, died=died, progressed=progressed)
            if died and not progressed:
                await asyncio.sleep(_AFTER_DEATH_S)
        rollout.attempts.check(error, max_attempts=self._config.max_attempts, longest_s=self._config.generate_timeout_s)

    async def _judge(self, rollout: Rollout, replica: Replica, end: End, error: EngineError) -> bool:
        """Have a replica back off, or be looked at, after an attempt that failed. True if its engine is dead."""
        log.warning(
            "an attempt ended", request=rollout.request_id, replica=replica.replica_id, end=end, error=str(error)
        )
        is_dead = False
        if end is End.BUSY:
            replica.backoff.busy(error.retry_after_s)
        elif end is End.FAILED:
            is_dead = await self._fleet.examine(replica, error)
            if not is_dead:
                replica.backoff.failed()
        if pause_s := replica.backoff.left_s:
            asyncio.get_running_loop().call_later(pause_s + _EARLY_S, self._pump, rollout.model)
        return is_dead

    async def _place(self, rollout: Rollout) -> Replica:
        """Wait for a replica with room, and take it there."""
        line = self._lines[rollout.model]
        if not len(line) and not self._is_closed(rollout.model):
            able = self._able(rollout)
            chosen = self._choose_and_reserve(rollout, self._wanted(rollout, able) if rollout.attempts.avoid else able)
            if chosen is not None:
                self._metrics.queue_seconds(rollout.model).observe(0.0)
                return chosen
        waiter = line.add(rollout)
        self._pump(rollout.model)
        self._watch_patience(rollout.model)
        try:
            return await waiter.placed
        except BaseException:
            if not waiter.placed.cancel() and not waiter.placed.cancelled() and waiter.placed.exception() is None:
                waiter.placed.result().release(rollout, None)  # placed in the very moment the client left
            line.done(waiter)
            self._pump(rollout.model)
            raise
        finally:
            self._metrics.queue_seconds(rollout.model).observe(time.monotonic() - waiter.began)

    def _check_patience(self, model: str) -> None:
        """Fail the rollouts in line that have waited for too long, and look again as long as any waits."""
        line, most_s = self._lines[model], self._config.queue_timeout_s
        replicas_quiet_s: dict[Queue, float] = {}
        for waiter in line.waiters():
            if waiter.quiet_s < most_s:
                continue
            queue = waiter.queue
            if queue not in replicas_quiet_s:  # all replicas are looked at where it matters alone
                replicas_quiet_s[queue] = self._quiet_s(waiter.rollout)
            if replicas_quiet_s[queue] >= most_s:
                self._end(waiter, line, DeadlineExceeded(self._why_not_placed(waiter.rollout)))
        self._watched_lines.discard(model)
        if len(line):
            self._watch_patience(model)

    def _watch_patience(self, model: str) -> None:
        if model not in self._watched_lines:
            self._watched_lines.add(model)
            each_s = min(_PATIENCE_CHECKED_EACH_S, self._config.queue_timeout_s / 10)
            asyncio.get_running_loop().call_later(each_s, self._check_patience, model)

    @staticmethod
    def _end(waiter: Waiter, line: WaitingLine, error: Exception) -> None:
        """End a wait; one whose client has left ends by itself."""
        if not waiter.placed.done():
            waiter.placed.set_exception(error)
            line.done(waiter)

    def _quiet_s(self, rollout: Rollout) -> float:
        """Seconds since a replica that may take the rollout has made tokens; infinite where none is at work."""
        if self._is_closed(rollout.model):
            return math.inf
        busy = (replica for replica in self._able(rollout) if replica.load_samples)
        return min((replica.evidence.quiet_s for replica in busy), default=math.inf)

    def _pump_all(self) -> None:
        for model in list(self._lines):
            self._pump(model)

    def _pump(self, model: str) -> None:
        """Look at the line of a model in the loop's next step: once, however many rollouts end or come in this one."""
        if len(self._lines[model]) and model not in self._to_look_at:
            self._to_look_at.add(model)
            asyncio.get_running_loop().call_soon(self._look_at_line, model)

    def _look_at_line(self, model: str) -> None:
        """Place waiting rollouts of a model in turn, while there is room.

        A rollout that waits for room reserves one replica, the one with the fewest samples, or large groups starve. It
        ends where no other replica has room for the smallest rollout in line: nothing else can be placed.
        """
        self._to_look_at.discard(model)
        line = self._lines[model]
        if self._is_closed(model):
            return
        this_pass, skipped = SchedulingPass(), set[Queue]()
        for waiter in line.in_turn(skipped):
            queue = waiter.queue
            if waiter.rollout.moves and queue in this_pass.rests_wait:
                continue
            if queue not in this_pass.able:
                this_pass.able[queue] = self._able(waiter.rollout)
            if this_pass.reserved:
                this_pass.need(line.least_samples)
            if open_ := this_pass.open_for(queue):
                self._place_or_reserve(waiter, open_, line, this_pass)
            else:
                skipped.add(queue)

    def _place_or_reserve(
        self, waiter: Waiter, open_: Sequence[Replica], line: WaitingLine, this_pass: SchedulingPass
    ) -> None:
        """Place a rollout on one of the replicas with room, or reserve one of those that it could go to."""
        rollout, able = waiter.rollout, this_pass.able[waiter.queue]
        wanted = self._wanted(rollout, able) if rollout.attempts.avoid else able
        fit = open_ if wanted is able else [one for one in open_ if one in wanted]
        chosen = self._choose_and_reserve(rollout, fit)
        if chosen is not None:
            this_pass.took(chosen)
            line.place(waiter, chosen)
        elif rollout.moves and any(one.has_place(rollout) for one in fit):
            this_pass.rests_wait.add(waiter.queue)
            if not any(one.prompts.leaves_rests for one in fit):  # what has not begun would be read beside the rests
                this_pass.reserve(*fit)
        else:
            this_pass.reserve(min(fit or wanted, key=lambda one: one.load_samples))

    def _choose_and_reserve(self, rollout: Rollout, able: Sequence[Replica]) -> Replica | None:
        """Place a rollout on one of the replicas, if it fits there."""
        session = rollout.model, rollout.session
        home = self._fleet.find(self._homes.get(session, "")) if rollout.session else None
        chosen = choose(rollout, able, home)
        if chosen is not None:
            if rollout.session:
                self._homes.note(session, chosen.replica_id)
            chosen.reserve(rollout)
            if rollout.moves:
                tells_first_token = chosen.info.streams and rollout.goes_on
                chosen.prompts.reads(rollout, partial(self._pump, rollout.model), tells_first_token)
        return chosen

    @staticmethod
    def _wanted(rollout: Rollout, able: Sequence[Replica]) -> Sequence[Replica]:
        """The replicas that have not failed the rollout; all where each has."""
        return [one for one in able if not rollout.attempts.avoid & {one.replica_id, one.info.incarnation}] or able

    def _able(self, rollout: Rollout) -> Sequence[Replica]:
        """Replicas that may take a rollout now: serving, not backing off, with what it needs; none while the model's
        weights are older than it demands.

        Where no replica of the model ever can do it, any of them gives the client its error.
        """
        if rollout.min_version or rollout.max_staleness is not None:
            least = rollout.least_version(self._fleet.target_of(rollout.model))
            if least > self._fleet.version_of(rollout.model):
                return []
        able = self._fleet.serving(rollout.model, rollout.adapter)
        if route := rollout.needs_route:
            able = [one for one in able if route in one.info.capabilities] or self._without(route, rollout.model)
        if Backoff.is_any_on():
            able = [replica for replica in able if not (replica.backoff.until and replica.backoff.left_s)]
        return able

    def _without(self, route: str, model: str) -> Sequence[Replica]:
        """Those that give a client its error where no replica of the model has the route; none where one that does not
        serve now has it, or one that is missing may have it."""
        ours = [one for one in self._fleet.replicas if one.info.model == model and one.state is not ReplicaState.LOST]
        groups = map(self._fleet.models.groups.__getitem__, {group for group, *_ in self._fleet.missing})
        may_come = any(one.served_name == model and one.kind is not EngineKind.SGLANG for one in groups)
        return [] if may_come or any(route in one.info.capabilities for one in ours) else self._fleet.serving(model)

    def _is_closed(self, model: str) -> bool:
        return bool(self._closed_for) and model == self._fleet.models.policy

    def _why_not_placed(self, rollout: Rollout) -> str:
        model, newest = rollout.model, self._fleet.target_of(rollout.model)
        replicas = [replica for replica in self._fleet.replicas if replica.info.model == model]
        states = ", ".join(f"{r.replica_id} {r.state} version {r.weight_version}" for r in replicas) or "none"
        closed = f"; the gate is closed for: {', '.join(self.closed_for)}" if self._is_closed(model) else ""
        least = rollout.least_version(newest)
        needs = f", which needs {rollout.needs_route}" if rollout.needs_route else ""
        demands = (
            f", which demands version {least} or newer (min_version = {rollout.min_version}, max_staleness = "
            f"{rollout.max_staleness}, the newest is {newest})"
            if least
            else ""
        )
        return (
            f"no replica of {model!r} took the rollout{needs}{demands} within {self._config.queue_timeout_s:g} s "
            f"(gateway.queue_timeout_s); replicas: {states}{closed}{self._fleet.starts.text}"
        )
