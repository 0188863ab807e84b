"""Runs a rollout of any dialect, whole or streamed: place it, read what a replica makes, continue what was cut off."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter

from engines.engine import Json
from engines.errors import Withdrawn
from gateway.dialects.part import Ask, Part
from gateway.dialects.sample import ABORT, Reply, Sample
from gateway.dialects.streams import Show
from gateway.fleet.concurrency import together
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler

_FULL = "length"
_NO_ADAPTER = nullcontext()


def using(rollout: Rollout) -> AbstractContextManager[None]:
    """Keeps the adapter of a rollout loaded, if it has one."""
    if rollout.adapter is None:
        return _NO_ADAPTER
    return rollout.adapter.used(rollout.request_id, goes_on=rollout.goes_on)


class Runner:
    """Has the replicas that the scheduler picks make rollouts. `lengths` are those that samples of prompts had."""

    def __init__(self, scheduler: Scheduler, fleet: Fleet, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._fleet = fleet
        self.lengths = scheduler.lengths
        self._metrics = metrics

    def withdraw(self, picks: Callable[[Rollout], bool]) -> None:
        """End rollouts that wait for a replica with `Withdrawn`."""
        self._scheduler.withdraw(picks)

    async def generate(self, ask: Ask, reply: Reply | None = None) -> Json:
        """The whole reply, each choice with its weight versions. Open samples of `reply`, which a gateway before this
        one has begun, continue."""
        reply = reply or Reply(ask.read)
        await self.run(ask, reply)
        told = ask.told(reply)
        self.count_missing(reply.num_unscored)
        return told

    async def run(self, ask: Ask, reply: Reply, show: Show | None = None) -> None:
        """Have replicas make all samples to their ends. `show` gets the chunks, if it is a stream."""
        try:
            with using(ask.rollout):  # also between what was cut off and its rest
                if not reply.samples:
                    await self.make(ask, reply, show)
                if reply.open:
                    await self.go_on(ask, reply, show)
        finally:
            self.learn(ask.rollout, reply.usage, list(map(attrgetter("reason"), reply.samples)))
            if show is not None:
                self.count_missing(reply.num_unscored)

    async def go_on(self, ask: Ask, reply: Reply, show: Show | None = None) -> None:
        """Have the open samples continued, each by itself, until they end."""
        await together(self.continue_sample(ask, reply, sample, show) for sample in reply.open)

    async def continue_sample(self, ask: Ask, reply: Reply, sample: Sample, show: Show | None = None) -> None:
        """Have one sample continued until it ends."""
        while sample.is_open:
            ask = ask.rest(reply, sample)
            self._metrics.kept_tokens.inc(sample.num_new)
            sample.keep(ask.inexact or ())
            await self.make(ask, reply, show)

    async def make(self, ask: Ask, reply: Reply, show: Show | None = None) -> None:
        """Have one replica make what is asked. Its samples are open after it where it was cut off, or failed."""
        if not reply.samples:
            fields = {"keeps_content": show is None, "scores_alone": ask.is_submitted}
            reply.samples = [Sample(index, **fields) for index in range(ask.rollout.n)]
        part = Part(ask, reply, show, self._fleet.version_of(ask.rollout.model))
        if ask.before is not None and ask.is_full:
            part.end(_FULL)
            return
        try:
            await self._scheduler.run(ask.rollout, part.make, part.kept)
        except Withdrawn:
            part.end(ABORT)
        if part.error is not None:
            raise part.error
        if reply.heard is not None:
            reply.heard()

    def count_missing(self, missing: int) -> None:
        """Count the tokens of samples that end which lack their log-prob."""
        if missing:
            self._metrics.missing_logprobs.inc(missing)

    def learn(self, rollout: Rollout, usage: Json, ends: Sequence[str | None]) -> None:
        """Remember the lengths of a rollout whose samples all ended by themselves."""
        made = usage.get("completion_tokens")
        if made and None not in ends and ABORT not in ends:
            self.lengths.delivered(rollout.model, rollout.prompt_key, made / rollout.n)
