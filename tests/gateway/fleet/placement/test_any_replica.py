"""A request that any engine can answer is answered by another where an engine fails, is silent, or refuses all."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engines.errors import DeadlineExceeded, EngineError, EngineFailed, EngineRefused, EngineUnreachable
from gateway.fleet.placement.any_replica import AnyReplica
from tests.rigs.rig import Json, Rig

ASKED = ("POST", "/tokenize", {"prompt": "abc"}, 5.0)


def refused(status: int) -> EngineRefused:
    return EngineRefused(f"it answered {status}", status=status, body={"error": "no"}, replica_id="engine-0")


class Played:
    """The answers of the rig's replicas: an error, or the replica's own name. `asked` has the order of the calls."""

    def __init__(self, rig: Rig, patch: pytest.MonkeyPatch) -> None:
        self.replicas = rig.fleet.replicas
        self.errors: dict[str, EngineError | DeadlineExceeded] = {}
        self.asked: list[str] = []
        for replica in self.replicas:
            patch.setattr(replica.engine, "ask", self._ask(replica.replica_id))

    def _ask(self, replica_id: str) -> Callable[..., Awaitable[Json]]:
        async def ask(*_: object) -> Json:
            self.asked.append(replica_id)
            if replica_id in self.errors:
                raise self.errors[replica_id]
            return {"by": replica_id}

        return ask


@pytest.fixture
def played(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(rig, monkeypatch)


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
    rig: Rig, played: Played, error: EngineError | DeadlineExceeded
) -> None:
    first, second = (replica.replica_id for replica in played.replicas[:2])
    played.errors[first] = error
    any_replica = AnyReplica(rig.fleet)
    for _ in range(2):
        assert await any_replica.ask(played.replicas[:2], *ASKED) == {"by": second}
    assert played.asked == [first, second, second]


async def test_a_refusal_of_the_request_is_the_answer_of_all(rig: Rig, played: Played) -> None:
    played.errors[played.replicas[0].replica_id] = refused(400)
    with pytest.raises(EngineRefused, match="400"):
        await AnyReplica(rig.fleet).ask(played.replicas, *ASKED)
    assert len(played.asked) == 1


async def test_where_all_fail_the_last_error_is_raised_and_the_next_request_asks_all_again(
    rig: Rig, played: Played
) -> None:
    for replica in played.replicas:
        played.errors[replica.replica_id] = EngineFailed("down", replica_id=replica.replica_id)
    any_replica = AnyReplica(rig.fleet)
    with pytest.raises(EngineFailed, match=played.replicas[-1].replica_id):
        await any_replica.ask(played.replicas, *ASKED)
    played.errors.clear()
    assert await any_replica.ask(played.replicas, *ASKED) == {"by": played.replicas[0].replica_id}


async def test_without_a_replica_there_is_an_error(rig: Rig) -> None:
    with pytest.raises(DeadlineExceeded, match="/tokenize"):
        await AnyReplica(rig.fleet).ask([], *ASKED)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/server_info"), ("GET", "/version")])
async def test_routes_of_models_are_answered_though_the_first_replica_is_silent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    async def silent(*_: object) -> Json:
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(rig.fleet.replicas[0].engine, "ask", silent)
    async with rig.client.request(method, rig.url + path) as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/version", "/server_info", "/tokenizer_info"])
async def test_a_head_of_a_route_of_engines_is_refused_at_once_as_engines_do(rig: Rig, path: str) -> None:
    async with asyncio.timeout(5), rig.client.head(rig.url + path) as response:
        assert response.status == 405
