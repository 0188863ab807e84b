"""All batches under way: the ones whose client has gone run on, and an equal request adopts each once.

TRL's client, as every client on urllib3 with retries, sends a request again whose connection broke: the same bytes,
without an id. Two equal requests whose clients are both there never share: each wants samples of its own.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import orjson
import structlog

from engines.engine import Json
from engines.errors import RolloutGatewayError
from engines.raw_json import NO_JSON
from gateway.config.schema import GatewayConfig
from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.completions import Completions, Written
from gateway.dialects.replays.batch import KIND, Batch, End
from gateway.dialects.submissions.frames import BatchHead
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.ledger.folder import Left
from gateway.ledger.ledger import Ledger, Record

log = structlog.get_logger()
T = TypeVar("T")

_MOST_ORPHANS = 1024
_MOST_BYTES = 1 << 30
# A client's end and its replay may arrive together, and the end is noticed a few turns of the event loop later.
_NOTICED_WITHIN_S = 0.05
_LONGEST_GAP_S = 600.0
"""Age of its last note beyond which no client waits for a batch: blind replays end within minutes."""


class Replays:
    """Runs batches, and brings them over a restart."""

    kind = KIND

    def __init__(
        self, config: GatewayConfig, completions: Completions, fleet: Fleet, metrics: Metrics, ledger: Ledger
    ) -> None:
        self._grace_s = config.replay_grace_s
        self._most_written = config.submissions.max_bytes // 4
        self._ledger = ledger
        ledger.add(self)
        self._completions = completions
        self._fleet = fleet
        self._metrics = metrics
        self._batches: defaultdict[bytes, list[Batch]] = defaultdict(list)
        self._orphans: dict[Batch, None] = {}  # in the order in which their clients left

    def report(self) -> Json:
        """The state for /status."""
        return {
            "batches": sum(batch.is_written for batch in self._all),
            "unwritten_batches": sum(batch.has_news for batch in self._all),
            "orphaned_batches": len(self._orphans),
        }

    def has_identity(self, prompts: Sequence[CompletionPrompt]) -> bool:
        """True for a batch; a single sample is cheap to make again."""
        return self._grace_s > 0 and (len(prompts) > 1 or prompts[0].rollout.n > 1)

    async def reply(
        self,
        identity: bytes,
        content: bytes,
        prompts: Sequence[CompletionPrompt],
        send: Callable[[Written, Callable[[], Awaitable[None]]], Awaitable[T]],
    ) -> T:
        """Have `send` deliver the reply to a batch with the body `content`. It awaits its second argument before the
        last bytes: from then on no later gateway delivers the reply again.

        It is left to a replay where the client goes meanwhile.
        """
        batch = await self._adopted(identity, prompts) or self._begun(identity, content, prompts)
        del content  # a large one, for as long as the batch takes
        try:
            written = await asyncio.shield(batch.task)
            written.head["id"] = f"cmpl-{prompts[0].request_id}"
            sent = await send(written, batch.forgotten)
        except (asyncio.CancelledError, ConnectionError):
            self._leave(batch)
            raise
        except BaseException:
            self._drop(batch)
            raise
        self._drop(batch)
        return sent

    def _begun(self, identity: bytes, content: bytes, prompts: Sequence[CompletionPrompt]) -> Batch:
        first = prompts[0]
        served = [replica.weight_version or 0 for replica in self._fleet.serving(first.rollout.model)]
        oldest = max(min(served, default=0), self._least(first))  # that a token made from now on may have
        head = BatchHead(identity, first.request_id, first.rollout.session, oldest, content)
        return self._run(Batch(head, prompts, self._ledger))

    def _run(self, batch: Batch) -> Batch:
        work = self._completions.written(batch.prompts, batch.replies)
        batch.task = asyncio.create_task(work, name=f"batch {batch.request_id}")
        self._batches[batch.identity].append(batch)
        return batch

    def _least(self, prompt: CompletionPrompt) -> int:
        """The oldest version that the client takes now."""
        return prompt.rollout.least_version(self._fleet.target_of(prompt.rollout.model))

    # Ledger

    @property
    def is_busy(self) -> bool:
        return bool(self._batches)

    async def write_news(self) -> None:
        if due := [batch for batch in self._all if batch.is_due]:
            await self._ledger.opened()
            for batch in due:
                batch.write()
        if not self._ledger.is_durable:
            self._stop_writing()
        self._keep_written_bound()

    @property
    def _all(self) -> list[Batch]:
        return [batch for equal in self._batches.values() for batch in equal]

    def _stop_writing(self) -> None:
        """A ledger that failed lacks notes: what is under way is in memory alone."""
        for batch in self._all:
            if batch.is_written:
                batch.forget()

    def _keep_written_bound(self) -> None:
        written = [batch for batch in self._all if batch.is_written]
        if sum(batch.written_bytes for batch in written) > self._most_written:
            log.warning("batches fill their part of the ledger: one of them is in memory alone")
            max(written, key=lambda batch: batch.written_bytes).forget()

    def write_all(self) -> None:
        self._stop_writing()

    def bring_back(self, left: Sequence[Left]) -> None:
        for one in left:
            try:
                if not self._grace_s or one.age_s > _LONGEST_GAP_S:
                    Record(self._ledger, one.name).remove()
                else:
                    self._go_on(one)
            except (*NO_JSON, RolloutGatewayError) as error:
                log.error("a batch in the ledger cannot be read", error=repr(error))
                Record(self._ledger, one.name).remove()

    def _go_on(self, left: Left) -> None:
        """Run the batch of a gateway before this one, whose client has gone with it."""
        head = msgspec.msgpack.decode(left.frames[0], type=BatchHead)
        prompts = self._completions.decode(orjson.loads(head.body), head.request_id, head.session)
        self._leave(self._run(Batch(head, prompts, self._ledger, left)))

    async def close(self) -> None:
        """Stop all batches without a client, which a later gateway goes on with."""
        tasks = [batch.task for batch in self._orphans]
        if batches := self._all:
            await self._ledger.opened()
            for batch in batches:
                batch.write()
                batch.stop()
        for batch in list(self._orphans):
            self._end_orphanhood(batch, End.STOPPED)
            batch.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Adoption

    async def _adopted(self, identity: bytes, prompts: Sequence[CompletionPrompt]) -> Batch | None:
        """Take an equal batch that has no client; None where there is none."""
        live = [batch.has_left for batch in self._batches.get(identity, ())]
        if live:
            await asyncio.wait(live, timeout=_NOTICED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        for batch in [batch for batch in self._batches.get(identity, ()) if batch.is_orphan]:
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
        self._orphans[batch] = None
        batch.expiry = asyncio.get_running_loop().call_later(self._grace_s, self._end, batch, End.EXPIRED)
        self._keep_bounds()
        batch.task.add_done_callback(lambda _: self._has_ended(batch))

    def _has_ended(self, batch: Batch) -> None:
        """Keep the reply of an orphan, unless nobody may have it."""
        if batch not in self._orphans:
            return
        if batch.has_failed:
            self._end(batch, End.FAILED)
        elif batch.is_aborted:
            self._end(batch, End.ABORTED)
        else:
            self._keep_bounds()

    def _keep_bounds(self) -> None:
        while len(self._orphans) > _MOST_ORPHANS or sum(batch.num_bytes for batch in self._orphans) > _MOST_BYTES:
            self._end(next(iter(self._orphans)), End.CROWDED)

    def _end(self, batch: Batch, end: End) -> None:
        self._end_orphanhood(batch, end)
        self._drop(batch)

    def _end_orphanhood(self, batch: Batch, end: End, **facts: str) -> None:
        assert batch.expiry is not None
        batch.expiry.cancel()
        del self._orphans[batch]
        self._metrics.orphaned_batch_ends.labels(end).inc()
        log.info("a batch without a client has ended", request=batch.request_id, end=end, **facts)

    def _drop(self, batch: Batch) -> None:
        batch.task.cancel()
        batch.forget()
        equal = self._batches[batch.identity]
        equal.remove(batch)
        if not equal:
            del self._batches[batch.identity]
