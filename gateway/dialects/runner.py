"""Runs one rollout of any dialect, whole or streamed: place it, ask an engine, continue what was cut off."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from engines.engine import Json
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.tokens import mark_cut_off, places_cut_off, retried_if_empty
from gateway.dialects.spans import stamp_versions
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica
from gateway.fleet.routing import Rollout
from gateway.fleet.scheduler import Scheduler, using


class Exchange(ABC):
    """One rollout in the words of its dialect: how an engine is asked, and how samples that were cut off continue."""

    rollout: Rollout

    @property
    @abstractmethod
    def resumes(self) -> bool:
        """True if samples may continue from their tokens."""

    @abstractmethod
    async def ask(self, replica: Replica) -> Json:
        """The reply of the replica's engine to the whole rollout."""

    @abstractmethod
    def chunks(self, replica: Replica) -> AsyncGenerator[Json]:
        """The chunks of the replica's engine, numbered as the client knows the samples."""

    @abstractmethod
    def prompt_ids(self, answer: Json) -> list[int] | None:
        """Token ids of the prompt as the engine read it; None where it does not report them."""

    @abstractmethod
    async def continued(self, answer: Json, cut: list[int]) -> Json | None:
        """The reply with the rest of the choices at the places `cut`. None where the rollout has to restart."""

    def shows(self, choice: Json, *, is_cut: bool) -> bool:
        """True if the client sees this choice of a chunk; `is_cut` where it was cut off and continues."""
        return True


class Runner:
    """Runs exchanges on the replicas that the scheduler picks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def generate(self, exchange: Exchange) -> Json:
        """The whole reply, each choice with its weight versions."""
        with using(exchange.rollout):  # also between what was cut off and its rest
            while True:
                answer = await self._scheduler.run(exchange.rollout, partial(self._ask, exchange))
                if not (cut := places_cut_off(answer)):
                    return answer
                if (whole := await exchange.continued(answer, cut)) is not None:
                    return whole

    async def _ask(self, exchange: Exchange, replica: Replica) -> Json:
        """The reply of one replica, as far as it got."""
        flight = replica.take_off()
        answer = await exchange.ask(replica)
        mark_cut_off(answer, replica, exchange.prompt_ids(answer), resumes=exchange.resumes)
        await replica.vouched()
        stamp_versions(answer, flight, exchange.rollout.adapter)
        return answer

    async def stream(self, exchange: Exchange, cut: CutStream) -> AsyncGenerator[Json]:
        """Chunks of the first replica, up to where samples are cut off; `cut` has noted the tokens then."""
        flight: Flight

        def call(replica: Replica) -> AsyncGenerator[Json]:
            nonlocal flight
            flight = replica.take_off()
            return retried_if_empty(exchange.chunks(replica), replica)

        async with aclosing(self._scheduler.stream(exchange.rollout, call)) as placed:
            async for replica, chunk in placed:
                cut.read_prompt(chunk.get("prompt_token_ids"))
                shown = [
                    choice
                    for choice in chunk["choices"]
                    if exchange.shows(choice, is_cut=cut.see(choice, replica, flight))
                ]
                if shown or not chunk["choices"]:
                    yield chunk | {"choices": shown}
