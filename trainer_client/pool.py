"""Batches out of more groups than a batch needs: it ends with the first groups, and the others go on in the next.

The longest samples of a batch keep few sequences busy for long. A pool has more prompts in work, suspends what is open
once the batch is full, and resumes that first, from its tokens, under the weights of the next batch.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from engines.errors import InvalidRequest, RolloutGatewayError, TooManyRequests, UnknownRoute
from trainer_client.client import Prompt, RolloutClient, checked_prompt
from trainer_client.results import Completion, Outcome, Rollout
from trainer_client.retries import may_pass
from trainer_client.sampling import SamplingParams
from trainer_client.submission import Submission, Suspended

_ABORT = "abort"
_PAUSE_S = 0.5
_PLACE = re.compile(r"groups\[(\d+)\]")
_SUSPENDED, _FAILED = "suspended", "failed"


@dataclass(slots=True, eq=False)
class _Group:
    """One prompt in work."""

    index: int
    prompt: Prompt
    version: int = 0
    """No token is older."""
    attempts: int = 0
    completions: list[Completion] = field(default_factory=list)
    source: Submission | None = None
    """What keeps its tokens, or has ended it, where it is at `place`."""
    place: int = 0

    @property
    def asked(self) -> Prompt | Suspended:
        return self.prompt if self.source is None else self.source.suspended(self.place)

    @property
    def is_new(self) -> bool:
        return self.source is None

    def begin_again(self) -> None:
        self.completions, self.source = [], None

    def has(self, need: int) -> bool:
        return len(self.completions) >= need

    def rollout(self) -> Rollout:
        assert self.source is not None
        read = self.source.prompt_token_ids.get(self.place)
        if read is None and not isinstance(self.prompt, str):
            read = np.asarray(self.prompt, np.int32)
        return Rollout(
            request_id=f"{self.source.id}-{self.place}",
            prompt_index=self.index,
            outcome=Outcome.DELIVERED,
            prompt_token_ids=read,
            completions=tuple(sorted(self.completions, key=lambda completion: completion.sample_index)),
            attempts=self.attempts,
        )


class RolloutPool:
    """Groups in work, which outlive the batches that are taken from them.

    prompts: read as they are needed, on the client's loop; the end of them ends the pool.
    size: groups in work while a batch is made, at least as many as it takes, and with `max_staleness` at most twice.
    need: samples of a group that are enough, `sampling.n` unless given. The others are dropped, which prefers short
    samples; a group that goes on later drops none.
    max_staleness: the most versions, at least 1, by which the oldest token of a batch may be behind those weights with
    which the batch began. A batch waits for groups that are at the bound; a group beyond it, after several updates
    between two batches, begins again from its prompt.
    timeout_s: limit on each batch, after which open groups begin again.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        *,
        size: int,
        need: int | None = None,
        max_staleness: int | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        self._client = client
        self._prompts: Iterator[tuple[int, Prompt]] = enumerate(prompts)
        self._sampling = sampling or SamplingParams()
        self._size = size
        self._need = self._sampling.n if need is None else need
        self._max_staleness = max_staleness
        self._timeout_s = timeout_s
        self._open: dict[int, _Group] = {}
        self._ended: list[_Group] = []
        self._failed: list[RolloutGatewayError] = []
        self._making: asyncio.Task[None] | None = None
        if size < 1:
            raise InvalidRequest(f"size = {size!r} must be at least 1", param="size")
        if not 1 <= self._need <= self._sampling.n:
            raise InvalidRequest(f"need = {need!r} must be 1 to n = {self._sampling.n}", param="need")
        if max_staleness is not None and max_staleness < 1:
            raise InvalidRequest(
                f"max_staleness = {max_staleness!r} must be at least 1: without staleness nothing goes on, and "
                "client.generate does",
                param="max_staleness",
            )

    async def __aenter__(self) -> "RolloutPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel a batch that is being made, and free what the gateway keeps of suspended groups."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)
        await self._begin_again(list(self._open.values()))

    async def batch(self, num_groups: int) -> list[Rollout]:
        """Return the first groups to have `need` samples, each with so many; fewer once the prompts are used up.

        `prompt_index` counts prompts as they were read. Raise the error of a group that failed, which leaves the pool,
        and of others in the next calls; groups that have ended stay for them. After any other error open groups begin
        again. A pool makes one batch at a time.
        """
        if self._making is not None and not self._making.done():
            raise InvalidRequest("a batch of this pool is being made: wait for its end, or make another pool")
        if not 1 <= num_groups <= self._size:
            raise InvalidRequest(f"num_groups = {num_groups!r} must be 1 to size = {self._size}", param="num_groups")
        if self._max_staleness is not None and self._size > 2 * num_groups:
            raise InvalidRequest(
                f"num_groups = {num_groups} is less than half of size = {self._size}: with max_staleness more groups "
                "could come to the bound than a batch takes",
                param="num_groups",
            )
        self._making = asyncio.create_task(self._fill_batch(num_groups), name="a pool's batch")
        await self._making
        self._ended.sort(key=lambda group: group.version)
        batch, self._ended = self._ended[:num_groups], self._ended[num_groups:]
        return [group.rollout() for group in batch]

    async def _fill_batch(self, num_groups: int) -> None:
        """Return once so many groups have ended, or all. Raise the error of one that failed."""
        deadline = time.monotonic() + self._timeout_s
        version = await self._client.weight_version()
        await self._begin_again([group for group in self._groups() if self._age(group, version) > 0])
        while not self._failed and not self._has(num_groups, version) and self._fill():
            if not self._failed:
                await self._make(num_groups, version, max(0.0, deadline - time.monotonic()))
        if self._failed:
            raise self._failed.pop(0)

    def _groups(self) -> Iterator[_Group]:
        yield from self._open.values()
        yield from self._ended

    def _has(self, num_groups: int, version: int) -> bool:
        """True if so many groups have ended, and none that is open is too old to go on in the next batch."""
        return len(self._ended) >= num_groups and all(self._age(group, version) < 0 for group in self._open.values())

    def _age(self, group: _Group, version: int) -> float:
        """Return the versions by which a group is beyond the bound; less than 0 within it."""
        if self._max_staleness is None or group.is_new:
            return -math.inf
        return version - group.version - self._max_staleness

    async def _begin_again(self, groups: list[_Group]) -> None:
        """Have groups begin with their prompts, and free what the gateway keeps of them."""
        await _free(self._let_go(groups))

    def _let_go(self, groups: list[_Group]) -> dict[Submission, list[int] | None]:
        """Have groups begin with their prompts. Return the places of those that the gateway keeps."""
        kept: dict[Submission, list[int] | None] = {}
        for group in groups:
            if group.source is not None and group.index in self._open:
                kept[group.source] = [*(kept.get(group.source) or ()), group.place]
            group.begin_again()
        again = {group.index: group for group in groups}
        self._open = dict(sorted({**again, **self._open}.items()))
        self._ended = [group for group in self._ended if group.index not in again]
        return kept

    def _fill(self) -> bool:
        """Take prompts up to the size of the pool; return if any group is open."""
        room = self._size - len(self._open) - len(self._ended)
        for index, prompt in islice(self._prompts, room):
            try:
                self._open[index] = _Group(index, checked_prompt(index, prompt))
            except InvalidRequest as error:
                self._failed.append(error)
        return bool(self._open)

    async def _make(self, num_groups: int, version: int, left_s: float) -> None:
        """Have the gateway work on all open groups until so many have ended, and suspend the others."""
        groups = sorted(self._open.values(), key=lambda group: group.is_new)
        submission = self._client.submit(
            [group.asked for group in groups],
            self._sampling,
            need=self._need,
            on_deadline="resume",
            min_version=version,
            timeout_s=left_s,
        )
        goes_on = not all(group.is_new for group in groups)
        had = [len(group.completions) for group in groups]
        for group in groups:
            group.version = version if group.is_new else group.version
            group.attempts += 1
        try:
            await self._read(submission, groups, lambda: self._has(num_groups, version))
        except InvalidRequest as error:  # nothing runs, and suspended groups still are
            if goes_on and _is_of_suspended(error):
                return await self._begin_again(list(self._open.values()))
            for group, count in zip(groups, had, strict=True):
                if group.index in self._open:
                    del group.completions[count:]
            if not (refused := _PLACE.match(error.param or "")):
                raise
            await self._begin_again([group := groups[int(refused[1])]])
            self._fail(group, error)
        except BaseException:
            await _free({**self._let_go(list(self._open.values())), submission: None})
            raise
        else:
            self._settle(submission, groups)

    async def _read(self, submission: Submission, groups: list[_Group], is_full: Callable[[], bool]) -> None:
        """Take in completions until all groups have ended, or those that run are suspended since the batch is full."""
        try:
            async with asyncio.TaskGroup() as tasks:
                ending: asyncio.Task[None] | None = None
                async for completion in submission:
                    self._take_in(completion, submission, groups)
                    if ending is None and is_full():
                        ending = tasks.create_task(_end(submission), name=f"end of {submission.id}")
                if ending is not None:
                    ending.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _take_in(self, completion: Completion, submission: Submission, groups: list[_Group]) -> None:
        group = groups[completion.prompt_index]
        if completion.finish_reason != _ABORT and not group.has(self._need):
            group.completions.append(replace(completion, prompt_index=group.index))
            if group.has(self._need):
                group.source, group.place = submission, completion.prompt_index
                self._ended.append(self._open.pop(group.index))

    def _settle(self, submission: Submission, groups: list[_Group]) -> None:
        """Note how open groups ended."""
        for place, group in enumerate(groups):
            if group.index not in self._open:
                continue
            outcome = submission.outcomes.get(place)
            if outcome == _SUSPENDED:
                group.source, group.place = submission, place
            elif outcome == _FAILED:
                self._fail(group, submission.failures[place])
            else:
                group.begin_again()

    def _fail(self, group: _Group, error: RolloutGatewayError) -> None:
        """Have a group leave the pool with its error, which names the prompt."""
        del self._open[group.index]
        error.args = (f"prompts[{group.index}]: {error}",)
        self._failed.append(error)


async def _free(kept: Mapping[Submission, list[int] | None]) -> None:
    """End groups, by their places; None for all. A gateway that is away frees them at its own bounds."""
    await asyncio.gather(*(_cancelled(submission, places) for submission, places in kept.items()))


async def _cancelled(submission: Submission, places: list[int] | None) -> None:
    with suppress(RolloutGatewayError):
        await submission.cancel(places)


async def _end(submission: Submission) -> None:
    """Suspend what runs, also where the gateway is away for a while."""
    while True:
        try:
            return await submission.let_deadline_pass()
        except RolloutGatewayError as error:
            if not may_pass(error) and not isinstance(error, TooManyRequests | UnknownRoute):
                raise
            await asyncio.sleep(_PAUSE_S)


def _is_of_suspended(error: InvalidRequest) -> bool:
    """True where the gateway has lost what it kept: the submission, or the tokens of a suspended group."""
    return isinstance(error, UnknownRoute) or (error.param or "").endswith(".resume")
