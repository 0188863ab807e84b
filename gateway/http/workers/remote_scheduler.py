"""Runs a worker's rollouts on the replicas on which the owner places them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

from engines.errors import EngineError, Withdrawn
from engines.trace_context import TRACE_CONTEXT, TRACEPARENT
from gateway.config.schema import GatewayConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.attempt_loop import AttemptLoop
from gateway.fleet.placement.attempts import End
from gateway.fleet.placement.lengths import Lengths
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica
from gateway.http.workers.failures import packed, unpacked, writable
from gateway.http.workers.messages import (
    Asked,
    Delivered,
    Examine,
    Failure,
    FromWorker,
    Judge,
    Left,
    Over,
    Place,
)

# Of a rollout without any limit; a message carries no larger number.
_MOST_TOKENS = 1 << 53


class _Turn:
    """One run of a rollout. `answer` is the owner's to the question that is open."""

    __slots__ = ("answer", "has_begun", "is_between", "is_placing", "is_withdrawn", "number", "rollout")

    def __init__(self, number: int, rollout: Rollout) -> None:
        self.number = number
        self.rollout = rollout
        self.has_begun = self.is_placing = self.is_between = self.is_withdrawn = False
        self.answer: asyncio.Future[Any] | None = None


class RemoteScheduler(AttemptLoop):
    """Asks the owner for a place for each attempt, and reports its end. The owner bounds the wait for a place."""

    def __init__(self, config: GatewayConfig, send: Callable[[FromWorker], None]) -> None:
        super().__init__(config)
        self.lengths = Lengths()
        self.fleet: Fleet
        """The worker's copy, which needs `examine`."""
        self._send = send
        self._numbers = count(1)
        self._turns: dict[int, _Turn] = {}  # by the rollout
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by the turn's number

    def served_version(self, model: str) -> int:
        return self.fleet.version_of(model)

    def delivered(self, rollout: Rollout, prompt_tokens: int, completion_tokens: int) -> None:
        """Counts that are none, which an engine may send, teach nothing."""
        try:
            prompt, completion = int(prompt_tokens), int(completion_tokens)
        except (TypeError, ValueError, OverflowError):
            return
        if max(abs(prompt), abs(completion)) < _MOST_TOKENS:
            session = writable(rollout.session)
            self._send(Delivered(rollout.model, session, rollout.prompt_key, rollout.n, prompt, completion))

    def withdraw(self, picks: Callable[[Rollout], bool]) -> None:
        for turn in self._turns.values():
            if not picks(turn.rollout):
                continue
            if turn.is_between:
                turn.is_withdrawn = True
            elif turn.is_placing and turn.answer is not None and not turn.answer.done():
                turn.answer.set_exception(_withdrawn(turn.rollout))

    @contextmanager
    def turn(self, rollout: Rollout) -> Iterator[None]:
        turn = self._turns[id(rollout)] = _Turn(next(self._numbers), rollout)
        try:
            yield
        finally:
            del self._turns[id(rollout)]
            if turn.has_begun:
                self._send(Over(turn.number))

    @asynccontextmanager
    async def placed(self, rollout: Rollout) -> AsyncIterator[Replica]:
        turn = self._turns[id(rollout)]
        replica = await self._place(turn)
        try:
            yield replica
        except (asyncio.CancelledError, GeneratorExit):
            raise  # the client has left: the end of the turn says so
        except BaseException as error:
            self._send(Left(turn.number, packed(error)))
            raise
        self._send(Left(turn.number, None))

    @contextmanager
    def between_attempts(self, rollout: Rollout) -> Iterator[None]:
        turn = self._turns[id(rollout)]
        turn.is_between = True
        try:
            yield
            if turn.is_withdrawn:
                raise _withdrawn(rollout)
        finally:
            turn.is_between = False

    async def judged(self, rollout: Rollout, replica: Replica, end: End, error: EngineError) -> bool:
        number = self._turns[id(rollout)].number
        is_dead: bool = await self._asked(number, Judge(number, end, packed(error)))
        return is_dead

    async def examine(self, replica: Replica, error: EngineError) -> bool:
        """True if the owner finds that the replica's engine is dead."""
        number = next(self._numbers)
        is_dead: bool = await self._asked(number, Examine(number, replica.replica_id, packed(error)))
        return is_dead

    def answer(self, turn: int, answer: Replica | bool | Failure) -> None:
        """Take the owner's answer to the open question of a turn, if it still waits."""
        waiting = self._answers.get(turn)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, Failure):
            waiting.set_exception(unpacked(answer))
        else:
            waiting.set_result(answer)

    async def _place(self, turn: _Turn) -> Replica:
        rollout = turn.rollout
        asked = None if turn.has_begun else _asked_of(rollout)
        turn.has_begun = turn.is_placing = True
        traceparent = TRACE_CONTEXT.get().get(TRACEPARENT, "")
        try:
            place = Place(turn.number, tuple(rollout.attempts.avoid), asked, traceparent)
            replica: Replica = await self._asked(turn.number, place, turn)
            return replica
        finally:
            turn.is_placing = False

    async def _asked(self, number: int, question: FromWorker, turn: _Turn | None = None) -> Any:
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if turn is not None:
            turn.answer = answer
        try:
            self._send(question)
            return await answer
        finally:
            del self._answers[number]


def _withdrawn(rollout: Rollout) -> Withdrawn:
    return Withdrawn(f"{rollout.request_id} was aborted")


def _asked_of(rollout: Rollout) -> Asked:
    return Asked(
        rollout.request_id,
        rollout.model,
        rollout.n,
        min(rollout.tokens, _MOST_TOKENS),
        rollout.min_version,
        rollout.max_staleness,
        writable(rollout.session),
        rollout.goes_on,
        rollout.needs_ids,
        rollout.needs_route,
        rollout.prompt_tokens,
        rollout.request,
        rollout.owner,
        rollout.priority,
        rollout.expected,
        rollout.prompt_key,
    )
