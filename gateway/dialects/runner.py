"""Runs one rollout of any dialect, whole or streamed: place it, ask an engine, continue what was cut off."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from engines.engine import Json
from engines.errors import EngineError, EngineFailed, EngineRefused
from gateway.dialects.assembly import Assembly
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.tokens import CUT_OFF, mark_cut_off, places_cut_off, retried_if_empty
from gateway.dialects.spans import Contradiction, check_spans, stamp_versions
from gateway.dialects.usage import usage_of_joined
from gateway.fleet.flight import Flight
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler, using
from gateway.fleet.replica import Replica


class Exchange(ABC):
    """One rollout in the words of its dialect: how an engine is asked, and how samples that were cut off continue."""

    rollout: Rollout

    @property
    @abstractmethod
    def inexact(self) -> tuple[str, ...] | None:
        """The fields with which samples that continue are marked; None if they may not continue from their tokens."""

    @property
    def resumes(self) -> bool:
        """True if samples may continue from their tokens."""
        return self.inexact is not None

    @abstractmethod
    async def ask(self, replica: Replica, part: "Part") -> Json:
        """The reply of the replica's engine to the whole rollout; `part` reads it if it comes in chunks."""

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


class Part:
    """The part of a whole reply that has arrived from one replica."""

    def __init__(self, replica: Replica) -> None:
        self.flight = replica.take_off()
        self.is_whole = False
        self._replica = replica
        self._assembly: Assembly | None = None

    async def read(self, chunks: AsyncGenerator[Json], assembly: Assembly) -> Json:
        """The whole reply out of its chunks."""
        self._assembly = assembly
        async with aclosing(chunks):
            async for chunk in chunks:
                self._replica.saw_progress()
                assembly.add(chunk)
        return assembly.reply()

    def kept(self, exchange: Exchange) -> Json | None:
        """The part as a reply whose open samples continue elsewhere; None if the rollout has to restart.

        A whole reply was refused for its content, and nothing of it is kept.
        """
        if self.is_whole:
            return None
        answer = self._assembly.part() if self._assembly and self._replica.weight_version is not None else None
        if answer is None or not exchange.resumes or (read := exchange.prompt_ids(answer)) is None:
            return None
        answer["usage"] = {"prompt_tokens": len(read)} | (answer.get("usage") or {})
        answer["usage"] = usage_of_joined(answer, answer["choices"])
        for choice in answer["choices"]:
            if choice["finish_reason"] is None:
                choice |= {"finish_reason": CUT_OFF, "prompt_token_ids": read}
        stamp_versions(answer, self.flight, exchange.rollout.adapter)
        return answer


class Runner:
    """Runs exchanges on the replicas that the scheduler picks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def withdraw(self, picks: Callable[[Rollout], bool]) -> None:
        """End rollouts that wait for a replica with `Withdrawn`."""
        self._scheduler.withdraw(picks)

    async def generate(self, exchange: Exchange) -> Json:
        """The whole reply, each choice with its weight versions."""
        with using(exchange.rollout):  # also between what was cut off and its rest
            while True:
                answer = await self._first_part(exchange)
                if not (cut := places_cut_off(answer)):
                    return answer
                if (whole := await exchange.continued(answer, cut)) is not None:
                    return whole
                exchange.rollout.attempts.lost_tokens()

    async def _first_part(self, exchange: Exchange) -> Json:
        """The reply of the first replica that gives one, or its part before the replica failed."""
        part: Part | None = None

        async def call(replica: Replica) -> Json:
            nonlocal part
            part = Part(replica)
            answer = await exchange.ask(replica, part)
            part.is_whole = True
            check_reply(answer, exchange.rollout.n, replica.replica_id)
            mark_cut_off(answer, replica, exchange.prompt_ids(answer), resumes=exchange.resumes)
            await replica.vouched()
            stamp_versions(answer, part.flight, exchange.rollout.adapter)
            return answer

        return await self._scheduler.run(exchange.rollout, call, lambda: part.kept(exchange) if part else None)

    async def stream(self, exchange: Exchange, cut: CutStream) -> AsyncGenerator[Json]:
        """Chunks of the first replica, up to where samples are cut off or the replica fails; `cut` has their tokens."""
        flight: Flight

        def call(replica: Replica) -> AsyncGenerator[Json]:
            nonlocal flight
            flight = replica.take_off()
            return retried_if_empty(exchange.chunks(replica), replica)

        try:
            async with aclosing(self._scheduler.stream(exchange.rollout, call)) as placed:
                async for replica, chunk in placed:
                    cut.read_prompt(chunk.get("prompt_token_ids"))
                    cut.check(chunk, replica.replica_id)
                    shown = [
                        choice
                        for choice in chunk["choices"]
                        if exchange.shows(choice, is_cut=cut.see(choice, replica, flight))
                    ]
                    if shown or not chunk["choices"]:
                        yield chunk | {"choices": shown}
        except EngineError as error:
            if isinstance(error, EngineRefused | Contradiction) or not cut.interrupt(flight):
                raise


def check_reply(answer: Json, n: int, replica_id: str) -> None:
    """Raise `EngineFailed` if a reply lacks samples, or has spans that do not fit its tokens."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or sorted(choice.get("index", -1) for choice in choices) != list(range(n)):
        found = len(choices) if isinstance(choices, list) else "no list of"
        raise EngineFailed(f"it answered with {found} choices, and {n} were asked for", replica_id=replica_id)
    for choice in choices:
        if choice.get("token_ids") is not None:
            check_spans(choice, len(choice["token_ids"]), replica_id)
