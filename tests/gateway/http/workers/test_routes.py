"""A replay finds its batch in any worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gateway.config.schema import GatewayConfig
from gateway.dialects.replays.registry import Replays
from gateway.fleet.metrics import Metrics
from gateway.http.workers.hop import OWNER, RunsElsewhere
from gateway.http.workers.messages import Batches
from gateway.http.workers.routes import WorkerReplays
from gateway.ledger.shared import SharedLedger


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> WorkerReplays:
    @asynccontextmanager
    async def here(*_: object) -> AsyncIterator[str]:
        yield "here"

    monkeypatch.setattr(Replays, "reply", here)
    replays = WorkerReplays(GatewayConfig(), cast(Any, None), cast(Any, None), Metrics(), SharedLedger(None))
    replays.is_owners = False
    return replays


async def door_of(replays: WorkerReplays, identity: bytes) -> str:
    """The process that answers a batch; "here" for this one."""
    try:
        async with replays.reply(identity, b"content", []) as reply:
            return str(reply)
    except RunsElsewhere as elsewhere:
        return elsewhere.door if elsewhere.content == b"content" else ""


async def test_a_batch_that_another_worker_has_is_answered_there(replays: WorkerReplays) -> None:
    replays.note(Batches(2, (b"a", b"b"), ()))
    assert [await door_of(replays, identity) for identity in (b"a", b"b", b"c")] == ["2", "2", "here"]
    replays.note(Batches(2, (), (b"a",)))
    assert [await door_of(replays, identity) for identity in (b"a", b"b")] == ["here", "2"]


async def test_the_batches_of_a_worker_that_has_ended_are_forgotten(replays: WorkerReplays) -> None:
    replays.note(Batches(1, (b"a",), ()))
    replays.note(Batches(2, (b"b",), ()))
    replays.serve_beside((0, 2))
    assert [await door_of(replays, identity) for identity in (b"a", b"b")] == ["here", "2"]


async def test_with_a_ledger_the_owner_has_all_batches(replays: WorkerReplays) -> None:
    replays.is_owners = True
    assert await door_of(replays, b"a") == OWNER
