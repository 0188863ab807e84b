"""Batches of /v1/completions: one whose client has gone runs on, also over a restart. An equal request adopts it once.

TRL's client, as every client on urllib3 with retries, sends a request again whose connection broke: the same bytes,
without an id. Two equal requests whose clients are both there never share: each wants samples of its own.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import TypeVar

import msgspec
import orjson
import structlog

from engines.engine import Json
from engines.errors import RolloutGatewayError
from engines.raw_json import NO_JSON
from gateway.config.schema import GatewayConfig
from gateway.dialects.completions import CompletionPrompt, Completions, Written
from gateway.dialects.growth import Growth, PromptRecord
from gateway.dialects.sample import ABORT, Reply
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.ledger.folder import Left
from gateway.ledger.ledger import Ledger, Record

log = structlog.get_logger()
T = TypeVar("T")
Send = Callable[[Written, Callable[[], Awaitable[None]]], Awaitable[T]]

KIND = "batch"
_BEHIND_THE_LOOP = 1 << 20  # bytes, whose digest takes a millisecond
_WORTH_IT_S = 1.0
"""Age from which a batch is written: a younger one has little to lose, and writing it would delay its reply."""
# A client's end and its replay may arrive together, and the end is noticed a few turns of the event loop later.
_NOTICED_WITHIN_S = 0.05
_LONGEST_GAP_S = 600.0
"""Age of its last step beyond which no client waits for a batch: blind replays end within minutes."""


class BatchHead(msgspec.Struct, frozen=True):
    """A batch of /v1/completions, with its body as it came. `identity` is the hash of the request, `oldest` the oldest
    weight version that its tokens may have."""

    identity: bytes
    request_id: str
    session: str
    oldest: int
    body: bytes


_read_head = msgspec.msgpack.Decoder(BatchHead).decode
_read_steps = msgspec.msgpack.Decoder(list[Growth]).decode


class End(StrEnum):
    """The end of a batch without a client."""

    ADOPTED = "adopted"  # an equal request has it
    EXPIRED = "expired"  # no equal request came in time
    STALE = "stale"  # the equal request demands newer weights
    FAILED = "failed"  # or was aborted


async def identity_of(route: str, client: str, content: bytes) -> bytes:
    """Return what equal requests of one client have in common; `client` is the name of its key."""
    digest = hashlib.blake2b(f"{route}\0{client}\0".encode(), digest_size=16)
    if len(content) > _BEHIND_THE_LOOP:
        await asyncio.to_thread(digest.update, content)
    else:
        digest.update(content)
    return digest.digest()


class Batch:
    """A run of a request's prompts, and how much of it its record has."""

    task: "asyncio.Task[Written]"

    def __init__(self, head: BatchHead, prompts: Sequence[CompletionPrompt], record: Record, *, writes: bool) -> None:
        self.identity, self.request_id, self.oldest = head.identity, head.request_id, head.oldest
        self.prompts = prompts
        self.record = record
        record.growth_of = self._growth_of
        self.has_left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done while it has no client."""
        self.expiry: asyncio.TimerHandle | None = None
        self.made: dict[int, PromptRecord] = {}
        """What there is of each prompt, until all of it is written; empty where nothing is."""
        if writes:
            self.made = {one.index: PromptRecord(one.index, one.read) for one in prompts}
        self.newest = 0
        """None of the tokens that a gateway before this one has made is of a newer weight version."""
        self._head = head if writes and not record.is_kept else None
        self._worth_it: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(_WORTH_IT_S, self.begin)

    def restore(self, steps: Iterable[Growth]) -> None:
        """Take what a gateway before this one has made."""
        for step in steps:
            self.made[step.prompt].restore(step)
            versions = [int(span.get("base_version") or span["version"]) for span in step.spans or ()]
            self.newest = max([self.newest, *versions])

    def reply_to(self, prompt: CompletionPrompt) -> Reply:
        """The reply to a prompt, as far as it has come, to be completed."""
        if (made := self.made.get(prompt.index)) is None:
            return Reply(prompt.read)
        made.begin(prompt)
        made.reply.heard = partial(self.record.grew, prompt.index)
        return made.reply

    def _growth_of(self, prompt: int) -> list[Growth]:
        if (made := self.made.get(prompt)) is None:
            return []
        steps = made.growth()
        if steps and steps[-1].end and made.is_recorded:
            del self.made[prompt]  # it would take memory beside its part of the reply
        return steps

    @property
    def has_failed(self) -> bool:
        """True where nobody may have its reply: it has none, or a client has ended a sample of it."""
        if not self.task.done():
            return False
        if self.task.cancelled() or self.task.exception() is not None:
            return True
        return any(reason == ABORT for reason, _ in self.task.result().ends)

    def begin(self) -> None:
        """Have all of it written that there is, and that comes."""
        self._worth_it = None
        if self._head is not None:
            self.record.begin(self._head)
            self._head = None

    def forget(self) -> None:
        """Drop the record, and write nothing any more."""
        if self._worth_it is not None:
            self._worth_it.cancel()
        self.made, self._head, self._worth_it = {}, None, None
        self.record.remove()


class Replays:
    """Runs batches, and brings them over a restart."""

    kind = KIND

    def __init__(
        self, config: GatewayConfig, completions: Completions, fleet: Fleet, metrics: Metrics, ledger: Ledger
    ) -> None:
        self._grace_s = config.replay_grace_s
        self._ledger = ledger
        ledger.add(self)
        self._completions = completions
        self._fleet = fleet
        self._metrics = metrics
        self._batches: defaultdict[bytes, list[Batch]] = defaultdict(list)
        self._orphans: set[Batch] = set()

    def report(self) -> Json:
        """The state for /status."""
        kept = sum(batch.record.is_kept for batch in self._all)
        return {"batches": kept, "orphaned_batches": len(self._orphans)}

    @property
    def are_on(self) -> bool:
        """True where a batch waits for its replay."""
        return self._grace_s > 0

    async def reply(self, identity: bytes, content: bytes, prompts: Sequence[CompletionPrompt], send: Send[T]) -> T:
        """Have `send` deliver the reply to a batch with the body `content`. It awaits its second argument before the
        last bytes: from then on no later gateway delivers the reply again.

        It is left to a replay where the client goes meanwhile.
        """
        batch = await self._adopted(identity, prompts) or self._begun(identity, content, prompts)
        del content  # a large one, for as long as the batch takes
        try:
            written = await asyncio.shield(batch.task)
            written.head["id"] = f"cmpl-{prompts[0].request_id}"
            sent = await send(written, partial(self._forgotten, batch))
        except (asyncio.CancelledError, ConnectionError):
            self._leave(batch)
            raise
        except BaseException:
            self._drop(batch)
            raise
        self._drop(batch)
        return sent

    async def _forgotten(self, batch: Batch) -> None:
        """Drop the record; return once no later gateway can find it."""
        if batch.record.is_kept:
            batch.forget()
            await self._ledger.written()

    def _begun(self, identity: bytes, content: bytes, prompts: Sequence[CompletionPrompt]) -> Batch:
        first = prompts[0]
        served = [replica.weight_version or 0 for replica in self._fleet.serving(first.rollout.model)]
        oldest = max(min(served, default=0), self._least(first))  # that a token made from now on may have
        head = BatchHead(identity, first.request_id, first.rollout.session, oldest, content)
        batch = Batch(head, prompts, Record.new(self._ledger, KIND), writes=self._ledger.is_durable)
        return self._run(batch)

    def _run(self, batch: Batch, steps: Iterable[Growth] = ()) -> Batch:
        batch.restore(steps)
        work = self._completions.written(batch.prompts, batch.reply_to)
        batch.task = asyncio.create_task(work, name=f"batch {batch.request_id}")
        self._batches[batch.identity].append(batch)
        return batch

    def _least(self, prompt: CompletionPrompt) -> int:
        """The oldest version that the client takes now."""
        return prompt.rollout.least_version(self._fleet.target_of(prompt.rollout.model))

    # Ledger

    @property
    def _all(self) -> list[Batch]:
        return [batch for equal in self._batches.values() for batch in equal]

    def bring_back(self, left: Sequence[Left]) -> None:
        for one in left:
            record = Record(self._ledger, one.name)
            try:
                if not self._grace_s or one.age_s > _LONGEST_GAP_S:
                    record.remove()
                else:
                    self._go_on(one, record)
            except (*NO_JSON, RolloutGatewayError) as error:
                log.error("a batch in the ledger cannot be read", error=repr(error))
                record.remove()

    def _go_on(self, left: Left, record: Record) -> None:
        """Run the batch of a gateway before this one, whose client has gone with it."""
        head = _read_head(left.frames[0])
        prompts = self._completions.decode(orjson.loads(head.body), head.request_id, head.session)
        batch = Batch(head, prompts, record, writes=True)
        self._leave(self._run(batch, chain.from_iterable(map(_read_steps, left.frames[1:]))))

    async def close(self) -> None:
        """Stop all batches without a client, which a later gateway goes on with."""
        for batch in self._all:
            batch.begin()
            batch.record.write_growth()
            batch.made = {}
        orphans, self._orphans = self._orphans, set()
        for batch in orphans:
            if batch.expiry is not None:
                batch.expiry.cancel()
            batch.task.cancel()
        await asyncio.gather(*(batch.task for batch in orphans), return_exceptions=True)

    # Adoption

    async def _adopted(self, identity: bytes, prompts: Sequence[CompletionPrompt]) -> Batch | None:
        """Take an equal batch that has no client; None where there is none."""
        live = [batch.has_left for batch in self._batches.get(identity, ())]
        if live:
            await asyncio.wait(live, timeout=_NOTICED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        for batch in [batch for batch in self._batches.get(identity, ()) if batch in self._orphans]:
            if not self._fits(batch, prompts[0]):
                self._end(batch, End.STALE)
                continue
            self._end_orphanhood(batch, End.ADOPTED, by=prompts[0].request_id)
            batch.has_left = asyncio.get_running_loop().create_future()
            return batch
        return None

    def _fits(self, batch: Batch, prompt: CompletionPrompt) -> bool:
        """True if the client takes the batch's versions. Versions above the fleet's are of another run's weights."""
        model = prompt.rollout.model
        is_ours = max(batch.oldest, batch.newest) <= self._fleet.target_of(model) or not self._fleet.serving(model)
        return is_ours and self._least(prompt) <= batch.oldest

    def _leave(self, batch: Batch) -> None:
        """Let a batch run on whose client has gone."""
        self._metrics.orphaned_batches.inc()
        log.info("a batch has lost its client, and runs on", request=batch.request_id, seconds=self._grace_s)
        batch.has_left.set_result(None)
        self._orphans.add(batch)
        batch.expiry = asyncio.get_running_loop().call_later(self._grace_s, self._end, batch, End.EXPIRED)
        batch.task.add_done_callback(lambda _: self._has_ended(batch))

    def _has_ended(self, batch: Batch) -> None:
        """Keep the reply of an orphan, unless nobody may have it."""
        if batch in self._orphans and batch.has_failed:
            self._end(batch, End.FAILED)

    def _end(self, batch: Batch, end: End) -> None:
        self._end_orphanhood(batch, end)
        self._drop(batch)

    def _end_orphanhood(self, batch: Batch, end: End, **facts: str) -> None:
        assert batch.expiry is not None
        batch.expiry.cancel()
        self._orphans.discard(batch)
        self._metrics.orphaned_batch_ends.labels(end).inc()
        log.info("a batch without a client has ended", request=batch.request_id, end=end, **facts)

    def _drop(self, batch: Batch) -> None:
        batch.task.cancel()
        batch.forget()
        equal = self._batches[batch.identity]
        equal.remove(batch)
        if not equal:
            del self._batches[batch.identity]
