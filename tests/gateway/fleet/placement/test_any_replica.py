"""A request that any engine can answer is answered by another where an engine fails, is silent, or refuses all."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engines.errors import DeadlineExceeded, EngineError, EngineFailed, EngineRefused, EngineUnreachable
from gateway.fleet.replica import Replica
from tests.rigs.rig import Json, Rig

Errors = dict[str, EngineError | DeadlineExceeded]


def refused(status: int) -> EngineRefused:
    return EngineRefused(f"it answered {status}", status=status, body={"error": "no"}, replica_id="engine-0")


def asked_in_turn(rig: Rig, errors: Errors, patch: pytest.MonkeyPatch) -> list[str]:
    """Have engines fail with these errors; return the replicas that are asked from now on, in order."""
    asked: list[str] = []

    def asking(replica: Replica) -> Callable[..., Awaitable[Json]]:
        ask = replica.engine.ask

        async def noted(*call: object) -> Json:
            asked.append(replica.replica_id)
            if replica.replica_id in errors:
                raise errors[replica.replica_id]
            return await ask(*call)  # type: ignore[arg-type]

        return noted

    for replica in rig.fleet.replicas:
        patch.setattr(replica.engine, "ask", asking(replica))
    return asked


async def tokenized(rig: Rig) -> int:
    return (await rig.post("/tokenize", {"prompt": "abc"}))[0]


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("no answer within 5 s"),
        EngineUnreachable("reset", replica_id="engine-0"),
        EngineFailed("it answered 500", replica_id="engine-0"),
        refused(401),
        refused(404),
        refused(429),
    ],
    ids=["silent", "reset", "500", "401", "404", "429"],
)
async def test_another_replica_answers_and_is_asked_first_from_then_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: EngineError | DeadlineExceeded
) -> None:
    asked = asked_in_turn(rig, {"engine-0": error}, monkeypatch)
    assert [await tokenized(rig), await tokenized(rig)] == [200, 200]
    assert asked == ["engine-0", "engine-1", "engine-1"]


async def test_a_refusal_of_the_request_is_the_answer_of_all(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_in_turn(rig, {"engine-0": refused(400)}, monkeypatch)
    assert await tokenized(rig) == 400
    assert asked == ["engine-0"]


async def test_where_all_fail_the_next_request_asks_all_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: Errors = {name: EngineFailed("down", replica_id=name) for name in ("engine-0", "engine-1")}
    asked = asked_in_turn(rig, errors, monkeypatch)
    assert await tokenized(rig) == 502
    errors.clear()
    assert await tokenized(rig) == 200
    assert asked == ["engine-0", "engine-1", "engine-0"]


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/version"])
async def test_routes_of_models_are_answered_though_the_first_replica_is_silent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked_in_turn(rig, {"engine-0": DeadlineExceeded("no answer")}, monkeypatch)
    assert (await rig.get(path))[0] == 200


@pytest.mark.parametrize("path", ["/version", "/server_info", "/tokenizer_info"])
async def test_a_head_of_a_route_of_engines_is_refused_at_once_as_engines_do(rig: Rig, path: str) -> None:
    async with asyncio.timeout(5), rig.client.head(rig.url + path) as response:
        assert response.status == 405
