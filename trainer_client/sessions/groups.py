"""Groups of sessions: each task is given to several agents, and their sessions come as one group once enough ended."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from engines.errors import InvalidRequest, RolloutGatewayError, UnknownRoute
from trainer_client.blocking import BlockingRolloutClient, _Blocking, _each
from trainer_client.client import RolloutClient
from trainer_client.sessions.calls import OpenSession, Sessions
from trainer_client.sessions.records import Session
from trainer_client.sessions.trajectories import counts_of

T = TypeVar("T")
Run = Callable[[T, OpenSession], Awaitable[float | None]]
"""Runs an agent on a task to its end. Returns the session's reward; None where it was sent, or there is none."""

_LAST_CALLS_S = 30.0
_DROP_TIMEOUT_S = 10.0
_OUTAGE_S = 180.0


@dataclass(slots=True, eq=False)
class SessionGroup(Generic[T]):
    """The sessions of one task, in the order of their end."""

    index: int
    """Counts tasks as they were read."""
    task: T
    sessions: list[Session] = field(default_factory=list)
    late: set[str] = field(default_factory=set)
    """Ids of sessions that the deadline cut off."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Sessions left out, by reason: "failed", "lost", "stale", "untrainable"."""
    failures: list[Exception] = field(default_factory=list)
    """What the agents of failed sessions raised."""
    is_short: bool = False
    """True with fewer sessions than `need`."""


class SessionGroups(Generic[T]):
    """Iterate finished groups, each once; the end of the iteration ends what runs.

    tasks: read as they are needed; the end of them ends the groups.
    run: the agent, for each session; what it raises drops the session, so that no fault is trained as a reward.
    n, need: sessions of a task, and how many are enough, all unless given: then the others are cut off and dropped.
    deadline_s: the time of a group. Open sessions are frozen then, and come as they are with the names in `late`.
    max_staleness: the most versions by which the oldest token of a session may be behind the served weights. An older
    session is dropped.
    in_work: groups at the same time.
    name, first: sessions are named NAME-INDEX-PLACE, and indexes count from `first`. A trainer that restarts with its
    name, and with the tasks after those that it has stored, is given the sessions that had ended without another run.

    A group is acked, and the gateway forgets it, once the loop comes back from its body.
    """

    def __init__(
        self,
        client: RolloutClient,
        tasks: Iterable[T],
        run: Run[T],
        *,
        n: int,
        need: int | None = None,
        deadline_s: float | None = None,
        max_staleness: int | None = None,
        in_work: int = 1,
        name: str | None = None,
        first: int = 0,
    ) -> None:
        self._client, self._sessions = client, Sessions(client)
        self._tasks = enumerate(tasks, first)
        self._run = run
        self._n, self._need = n, n if need is None else need
        self._deadline_s, self._max_staleness = deadline_s, max_staleness
        self._in_work = in_work
        self._name = name or uuid.uuid4().hex
        for field_name, value in (("n", n), ("in_work", in_work)):
            if value < 1:
                raise InvalidRequest(f"{field_name} = {value!r} must be at least 1", param=field_name)
        if not 1 <= self._need <= n:
            raise InvalidRequest(f"need = {need!r} must be 1 to n = {n}", param="need")

    async def __aiter__(self) -> AsyncGenerator[SessionGroup[T]]:
        """Raise the gateway's errors. What had ended is kept by the gateway, for a trainer with the same name."""
        making: set[asyncio.Task[SessionGroup[T]]] = set()
        try:
            while True:
                for index, task in islice(self._tasks, self._in_work - len(making)):
                    making.add(asyncio.create_task(self._make(SessionGroup(index, task)), name=f"group {index}"))
                if not making:
                    return
                ended, _ = await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
                making.discard(one := ended.pop())
                group = one.result()
                await self._drop_unfit(group)
                yield group
                for session in group.sessions:
                    await self._sessions.ack(session.id)
        finally:
            for one in making:
                one.cancel()
            await asyncio.gather(*making, return_exceptions=True)

    async def _make(self, group: SessionGroup[T]) -> SessionGroup[T]:
        """Run a group until it has what it needs, its sessions have ended, or its time is over."""
        deadline = None if self._deadline_s is None else asyncio.get_running_loop().time() + self._deadline_s
        names = [f"{self._name}-{group.index}-{place}" for place in range(self._n)]
        running = {asyncio.create_task(self._one(group, name, deadline), name=name) for name in names}
        try:
            while running and len(group.sessions) < self._need:
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for one in ended:
                    one.result()
                await self._drop_unfit(group)
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if not group.late:
                del group.sessions[self._need :]
            kept = {session.id for session in group.sessions}
            await self._drop([name for name in names if name not in kept])
        return group

    async def _one(self, group: SessionGroup[T], name: str, deadline: float | None) -> None:
        """Run one session to its end, and add it to the group."""
        try:
            opened = await self._begin(name, group.index)
            if not opened.is_frozen and not await self._has_run(group, opened, deadline):
                return
            session = await self._sessions.read(name)
        except UnknownRoute:  # a 404
            session = None
        if session and session.began == opened.began:
            group.sessions.append(session)
        else:  # a gateway without a ledger was killed, and perhaps a later call began it again
            group.dropped["lost"] += 1

    async def _begin(self, name: str, index: int) -> OpenSession:
        """Begin a session. One that a trainer left open begins again: its agent has ended with the trainer."""
        metadata = {"group": f"{self._name}-{index}"}
        opened = await self._sessions.begin(name, metadata)
        if opened.is_new or opened.is_frozen:
            return opened
        await self._sessions.drop(name)
        return await self._sessions.begin(name, metadata)

    async def _has_run(self, group: SessionGroup[T], opened: OpenSession, deadline: float | None) -> bool:
        """Run the agent to its end or the deadline, and freeze its session. Return False where it failed."""
        reward, wait_s = None, _LAST_CALLS_S
        try:
            async with asyncio.timeout_at(deadline) as limit:
                reward = await self._run(group.task, opened)
        except Exception as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                group.dropped["failed"] += 1
                group.failures.append(error)
                return False
            group.late.add(opened.id)
            wait_s = 0.0
        await self._sessions.freeze(opened.id, reward, wait_s=wait_s)
        return True

    async def _drop_unfit(self, group: SessionGroup[T]) -> None:
        """Drop sessions that are too old for the served weights, or have nothing to train."""
        version = 0 if self._max_staleness is None else await self._client.weight_version(_OUTAGE_S)
        unfit = list[str]()
        for session in group.sessions.copy():
            is_trainable, oldest = counts_of(session).trainable > 0, session.oldest_version or 0
            if is_trainable and (self._max_staleness is None or version - oldest <= self._max_staleness):
                continue
            group.sessions.remove(session)
            group.dropped["stale" if is_trainable else "untrainable"] += 1
            unfit.append(session.id)
        group.is_short = len(group.sessions) < self._need
        await self._drop(unfit)

    async def _drop(self, names: list[str]) -> None:
        """Free what the gateway keeps of sessions. One that is away frees them at its own bounds."""
        with suppress(RolloutGatewayError, TimeoutError):
            async with asyncio.timeout(_DROP_TIMEOUT_S):
                await asyncio.gather(*map(self._sessions.drop, names))


class BlockingSessionGroups(_Blocking[SessionGroups[Any]]):
    """`SessionGroups` as a blocking iterator with the same arguments. `run` is a coroutine function, and it and `tasks`
    run on the client's thread."""

    def __init__(self, client: BlockingRolloutClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(SessionGroups(client._inner, *args, **kwargs), client._thread)

    __iter__ = _each(SessionGroups.__aiter__)
