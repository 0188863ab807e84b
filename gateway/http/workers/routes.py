"""The routes that a worker answers itself, and the requests of these that it leaves to another process."""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from engines.engine import Json
from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.completions import Written
from gateway.dialects.replays.batch import Batch
from gateway.dialects.replays.registry import Replays
from gateway.fleet.fleet import Fleet
from gateway.http.access import Access
from gateway.http.routes.rollouts import RolloutRoutes
from gateway.http.workers.hop import IS_SENT_ON, RunsElsewhere
from gateway.http.workers.messages import Batches

# `lora_path` is SGLang's.
_MODEL_FIELDS = ("model", "lora_path")


class WorkerRoutes(RolloutRoutes):
    """Generation by the models. The owner knows the LoRA adapters, and has an error for other names."""

    def __init__(self, fleet: Fleet, *parts: Any) -> None:
        """`parts` are those of `RolloutRoutes`."""
        super().__init__(*parts)
        self._fleet = fleet

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self.add_generation(router, access)

    async def _read(self, request: web.Request) -> tuple[bytes, Json, str]:
        content, body, session = await super()._read(request)
        named = (body.get(field) for field in _MODEL_FIELDS)
        if any(name and name not in self._fleet.models.names for name in named):
            raise RunsElsewhere(content)
        return content, body, session


class WorkerReplays(Replays):
    """Runs batches, and knows in which other worker an equal one runs, which a replay may adopt.

    With a ledger all batches are the owner's, which keeps it.
    """

    tell: Callable[[Batches], None]
    """Takes what the other workers are to know."""
    is_owners: bool
    """True where the owner runs all batches."""

    def __init__(self, *parts: Any) -> None:
        """`parts` are those of `Replays`."""
        super().__init__(*parts)
        self._elsewhere: dict[bytes, int] = {}

    def note(self, batches: Batches) -> None:
        """Note which batches another worker has begun, and which have ended there."""
        self._elsewhere |= dict.fromkeys(batches.begun, batches.worker)
        for identity in batches.ended:
            if self._elsewhere.get(identity) == batches.worker:
                del self._elsewhere[identity]

    def serve_beside(self, workers: Collection[int]) -> None:
        """Forget the batches of workers that have ended; these serve."""
        self._elsewhere = {identity: worker for identity, worker in self._elsewhere.items() if worker in workers}

    @asynccontextmanager
    async def reply(
        self, identity: bytes, content: bytes, prompts: Sequence[CompletionPrompt]
    ) -> AsyncIterator[Written]:
        if self.is_owners:
            raise RunsElsewhere(content)
        if identity not in self._batches and identity in self._elsewhere and not IS_SENT_ON.get():
            raise RunsElsewhere(content, self._elsewhere[identity])
        async with super().reply(identity, content, prompts) as replying:
            yield replying

    def _run(self, batch: Batch) -> Batch:
        if batch.identity not in self._batches:
            self.tell(Batches(0, (batch.identity,), ()))
        return super()._run(batch)

    def _drop(self, batch: Batch) -> None:
        super()._drop(batch)
        if batch.identity not in self._batches:
            self.tell(Batches(0, (), (batch.identity,)))
