"""Runs one rollout of any dialect, whole or streamed: place it, ask an engine, continue what was cut off."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from engines.engine import Json
from engines.errors import EngineError, EngineFailed, EngineRefused, Withdrawn
from gateway.dialects.replies.assembly import Assembly
from gateway.dialects.replies.carried import num_tokens, opened
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.tokens import CUT_OFF, mark_cut_off, places_cut_off, retried_if_empty, was_cut_off
from gateway.dialects.spans import mark_unscored, name_adapter, stamp_versions
from gateway.dialects.usage import usage_of_joined
from gateway.fleet.flight import Flight
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.attempt_loop import AttemptLoop, using
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica

_LARGE_BYTES = 1 << 14
_ABORT, _FULL = "abort", "length"


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

    @property
    def is_full(self) -> bool:
        """True for the rest of a sample that has all of its tokens: its engine died before it reported the end."""
        return False

    @abstractmethod
    async def ask(self, replica: Replica, part: "Part") -> Json:
        """The reply of the replica's engine to the whole rollout; `part` reads it if it comes in chunks."""

    @abstractmethod
    def chunks(self, replica: Replica) -> AsyncGenerator[list[Json]]:
        """The chunks of the replica's engine, in lists of those that came together, numbered as the client knows the
        samples."""

    @abstractmethod
    def prompt_ids(self, answer: Json) -> list[int] | None:
        """Token ids of the prompt as the engine read it; None where it does not report them."""

    @abstractmethod
    async def continued(self, answer: Json, cut: list[int]) -> Json | None:
        """The reply with the rest of the choices at the places `cut`. None where the rollout has to restart."""

    @abstractmethod
    def bare_reply(self) -> Json:
        """The reply to a rollout that ends without an engine: choices without tokens."""

    @abstractmethod
    def bare_chunk(self) -> Json:
        """As `bare_reply`, for a stream: numbered as the client knows the samples."""

    def shows(self, choice: Json, *, is_cut: bool) -> bool:
        """True if the client sees this choice of a chunk; `is_cut` where it was cut off and continues."""
        return True


class Part:
    """The part of a whole reply that has arrived from one replica."""

    def __init__(self, replica: Replica, large: asyncio.Lock) -> None:
        self.flight = replica.take_off()
        self.is_whole = False
        self.replica = replica
        self._large = large
        self._assembly: Assembly | None = None

    async def read(
        self, events: AsyncGenerator[list[bytes]], assembly: Assembly, note: Callable[[list[bytes]], None] | None = None
    ) -> Json:
        """The whole reply out of its chunks. `note` gets them too."""
        self._assembly = assembly
        async with aclosing(events):
            async for together in events:
                self.replica.saw_progress()
                await self._add(together, assembly)
                if note is not None:
                    note(together)
        return await assembly.joined(self._large)

    async def _add(self, together: list[bytes], assembly: Assembly) -> None:
        if sum(map(len, together)) > _LARGE_BYTES:
            async with self._large:  # many replies may come at once: each is read in a turn of the event loop
                await asyncio.sleep(0)
        assembly.add(together)

    def kept(self, exchange: Exchange) -> Json | None:
        """The part as a reply whose open samples continue elsewhere; None if the rollout has to restart.

        A whole reply was refused for its content, and nothing of it is kept.
        """
        if self.is_whole or self._assembly is None or self.replica.weight_version is None:
            return None
        return kept_part(
            self._assembly, exchange, self.flight, lambda choice: was_cut_off({"choices": [choice]}, self.replica)
        )


def kept_part(assembly: Assembly, exchange: Exchange, flight: Flight, was_cut: Callable[[Json], bool]) -> Json | None:
    """The chunks of a replica as a reply whose open samples continue elsewhere; None if the rollout has to restart."""
    answer = assembly.part()
    if answer is None or not exchange.resumes or (read := exchange.prompt_ids(answer)) is None:
        return None
    answer["usage"] = {"prompt_tokens": len(read)} | (answer.get("usage") or {})
    answer["usage"] = usage_of_joined(answer, answer["choices"])
    for choice in answer["choices"]:
        if choice["finish_reason"] is None or was_cut(choice):
            choice |= {"finish_reason": CUT_OFF, "prompt_token_ids": read}
    stamp_versions(answer, flight, exchange.rollout.adapter)
    return answer


class Runner:
    """Runs exchanges on the replicas that the scheduler picks."""

    def __init__(self, scheduler: AttemptLoop, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._large = asyncio.Lock()

    def withdraw(self, picks: Callable[[Rollout], bool]) -> None:
        """End rollouts that wait for a replica with `Withdrawn`."""
        self._scheduler.withdraw(picks)

    async def generate(self, exchange: Exchange, made: Json | None = None) -> Json:
        """The whole reply, each choice with its weight versions.

        `made` is a reply of a gateway before this one, whose open samples continue.
        """
        if exchange.is_full:
            return self._ended(exchange, exchange.bare_reply(), _FULL)
        with using(exchange.rollout):  # also between what was cut off and its rest
            while True:
                answer, made = made or await self._first_part(exchange), None
                if not (cut := places_cut_off(answer)):
                    return self._whole(exchange.rollout, answer)
                kept = [num_tokens(answer["choices"][place].get("token_ids")) for place in cut]
                if (whole := await exchange.continued(opened(answer), cut)) is not None:
                    self.count_kept(kept)
                    return self._whole(exchange.rollout, whole)
                exchange.rollout.attempts.lost_tokens()

    def expected(self, model: str, key: int) -> float | None:
        """The tokens that a sample of a prompt will have, by its last samples; None where there were none."""
        return self._scheduler.lengths.of(model, key)

    def _whole(self, rollout: Rollout, reply: Json) -> Json:
        unscored = sum(map(mark_unscored, reply["choices"]))
        if not rollout.goes_on:
            self._metrics.missing_logprobs.inc(unscored)
        self._delivered(rollout, reply.get("usage"), reply["choices"])
        return reply

    def _delivered(self, rollout: Rollout, usage: Json | None, choices: Iterable[Json]) -> None:
        """Let the scheduler learn from a whole rollout. The rest of a sample says nothing of its length."""
        usage = usage or {}
        made = usage.get("completion_tokens")
        if made and not rollout.goes_on and all(choice.get("finish_reason") != "abort" for choice in choices):
            prompt_tokens = usage.get("prompt_tokens") or rollout.prompt_tokens
            self._scheduler.delivered(rollout, prompt_tokens, made)

    def count_kept(self, lengths: Iterable[int]) -> None:
        """Count the tokens of samples that continue from them."""
        self._metrics.kept_tokens.inc(sum(lengths))

    def _ended(self, exchange: Exchange, bare: Json, finish_reason: str) -> Json:
        for choice in bare["choices"]:
            version = self._scheduler.served_version(exchange.rollout.model)
            end = {"finish_reason": finish_reason, "stop_reason": None}
            choice |= end | {"weight_version": version, "weight_versions": []}
            name_adapter(choice, exchange.rollout.adapter)
        return bare

    async def _first_part(self, exchange: Exchange) -> Json:
        """The reply of the first replica that gives one, or its part before the replica failed."""
        part: Part | None = None

        async def call(replica: Replica) -> Json:
            nonlocal part
            part = Part(replica, self._large)
            answer = await exchange.ask(replica, part)
            part.is_whole = True
            check_reply(answer, exchange.rollout.n, replica.replica_id)
            mark_cut_off(answer, replica, exchange.prompt_ids(answer), resumes=exchange.resumes)
            await replica.vouched()
            stamp_versions(answer, part.flight, exchange.rollout.adapter)
            return answer

        def kept() -> Json | None:
            return part.kept(exchange) if part else None

        try:
            return await self._scheduler.run(exchange.rollout, call, kept)
        except Withdrawn:
            return _aborted(made) if (made := kept()) else self._ended(exchange, exchange.bare_reply(), _ABORT)

    async def stream(self, exchange: Exchange, cut: CutStream) -> AsyncGenerator[Json]:
        """Chunks of the first replica, up to where samples are cut off or the replica fails; `cut` has their tokens."""
        if exchange.is_full:
            yield cut.end(self._ended(exchange, exchange.bare_chunk(), _FULL), None)
            return
        flight: Flight | None = None
        is_withdrawn, usage = False, Json()

        def call(replica: Replica) -> AsyncGenerator[list[Json]]:
            nonlocal flight
            flight = replica.take_off()
            return retried_if_empty(exchange.chunks(replica), replica)

        try:
            async with aclosing(self._scheduler.stream(exchange.rollout, call)) as placed:
                async for replica, chunk in placed:
                    cut.read_prompt(chunk.get("prompt_token_ids"))
                    assert flight is not None
                    usage = chunk.get("usage") or usage
                    shown = [
                        choice
                        for choice in chunk["choices"]
                        if exchange.shows(choice, is_cut=cut.see(choice, replica, flight))
                    ]
                    if shown or not chunk["choices"]:
                        yield chunk | {"choices": shown}
            cut.check_ends()
        except EngineError as error:
            if isinstance(error, EngineRefused) or flight is None or not cut.interrupt(flight):
                raise
        except Withdrawn:
            is_withdrawn = True
        finally:
            self._metrics.missing_logprobs.inc(cut.num_unscored)
            if cut.is_whole:  # its reader may leave before the usage comes
                self._delivered(exchange.rollout, {"completion_tokens": cut.num_made} | usage, ())
        if is_withdrawn or cut.lacks_aborted:
            yield cut.end(self._ended(exchange, exchange.bare_chunk(), _ABORT), flight)


def _aborted(part: Json) -> Json:
    """A part that does not continue, as its client aborted the rest."""
    for place in places_cut_off(part):
        part["choices"][place]["finish_reason"] = _ABORT
    return part


def check_reply(answer: Json, n: int, replica_id: str) -> None:
    """Raise `EngineFailed` if a reply lacks samples, as that of an external server that knows no `n`."""
    if (found := len(answer.get("choices") or ())) != n:
        raise EngineFailed(f"it answered with {found} choices, and {n} were asked for", replica_id=replica_id)
