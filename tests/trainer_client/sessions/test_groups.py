"""Groups of sessions over HTTP, against a gateway that is played: it keeps the records that agents give it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engines.errors import InvalidRequest, NotAllowed
from gateway.api import error_body
from tests.rigs.session_records import as_bytes, call, events
from trainer_client import RolloutClient, SessionGroups, retries
from trainer_client.http import PACKED
from trainer_client.sessions.calls import OpenSession
from trainer_client.sessions.groups import SessionGroup

Json = dict[str, Any]


class PlayedSessions:
    """The routes of sessions, with `calls` and `rewards` by session. `away` are answers of 502 before the next right
    one, `breaks` reads that break off,
    `read_s` seconds before a read's answer."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Json]] = {}
        self.states: dict[str, str] = {}
        self.rewards: dict[str, float | None] = {}
        self.acked: list[str] = []
        self.dropped: list[str] = []
        self.version = 3
        self.away = 0
        self.breaks = 0
        self.refuses = False
        self.read_s: dict[str, float] = {}
        self.began = 0.5

    @web.middleware
    async def fails(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refuses:
            return web.json_response(error_body("a key is needed", 401), status=401)
        if self.away:
            self.away -= 1
            return web.json_response(error_body("away", 502), status=502)
        if request.path.startswith("/v1/sessions/") and request.match_info["id"] not in self.calls:
            return web.json_response(error_body("no such session", 404), status=404)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def begin(self, request: web.Request) -> web.Response:
        name = (await request.json())["id"]
        is_new = name not in self.calls
        self.calls.setdefault(name, [])
        state = self.states.setdefault(name, "open")
        body = {"id": name, "key": f"rgs-{name}", "url": f"/sessions/{name}/v1", "state": state}
        body |= {"began": self.began, "new": is_new}
        return web.json_response(body, status=201 if is_new else 200)

    async def freeze(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        self.states[name] = "frozen"
        self.rewards[name] = (await request.json()).get("reward")
        return web.json_response({"id": name})

    async def read(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        await asyncio.sleep(self.read_s.get(name, 0.0))
        assert request.headers["Accept"] == PACKED
        told = {"state": self.states[name], "reward": self.rewards.get(name), "began": self.began}
        records = events(*self.calls[name], id=name, **told)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.breaks:
            self.breaks -= 1
            records = records[:-1]
        for record in map(as_bytes, records):
            await response.write(_frame(record))
        return response

    async def ack(self, request: web.Request) -> web.Response:
        self.acked.append(name := request.match_info["id"])
        del self.calls[name]
        return web.json_response({"id": name, "state": "acked"})

    async def drop(self, request: web.Request) -> web.Response:
        self.dropped.append(name := request.match_info["id"])
        del self.calls[name]
        self.states.pop(name)
        return web.json_response({"id": name})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})


def _frame(record: Json) -> bytes:
    content = msgspec.msgpack.encode(record)
    return bytes([0xCE]) + len(content).to_bytes(4, "big") + content


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> PlayedSessions:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    return PlayedSessions()


@pytest.fixture
async def client(gateway: PlayedSessions) -> AsyncIterator[RolloutClient]:
    app = web.Application(middlewares=[gateway.fails])
    app.add_routes(
        [
            web.post("/v1/sessions", gateway.begin),
            web.get("/v1/sessions/{id}", gateway.read),
            web.delete("/v1/sessions/{id}", gateway.drop),
            web.post("/v1/sessions/{id}/freeze", gateway.freeze),
            web.post("/v1/sessions/{id}/ack", gateway.ack),
            web.get("/weight_info", gateway.weight_info),
        ]
    )
    async with TestServer(app) as server, RolloutClient(str(server.make_url("")), outage_s=5.0) as client:
        yield client


class Agents:
    """Agents that each make one call, and then do what their place says: return a reward, raise, or stay."""

    def __init__(self, gateway: PlayedSessions, *does: float | Exception | None) -> None:
        self._gateway = gateway
        self._does = does
        self.ran: list[str] = []

    async def __call__(self, task: int, session: OpenSession) -> float | None:
        self.ran.append(session.id)
        self._gateway.calls[session.id].append(call(0, prompt=(5, task + 10)))
        does = self._does[int(session.id.rpartition("-")[2])]
        if isinstance(does, Exception):
            raise does
        if does is None:
            await asyncio.sleep(3600.0)
        await asyncio.sleep(0.01 * (does or 0.0))
        return does


async def all_of(groups: SessionGroups[int]) -> list[SessionGroup[int]]:
    return [group async for group in groups]


async def test_each_task_comes_as_a_group_with_rewards_and_is_acked_after_its_body(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    groups = SessionGroups(client, range(3), Agents(gateway, 0.0, 1.0), n=2, in_work=2, name="step")
    seen = []
    async for group in groups:
        assert not any(session.id in gateway.acked for session in group.sessions)
        assert [session.calls[0].prompt_token_ids.tolist() for session in group.sessions] == [[5, group.task + 10]] * 2
        assert [(session.id, session.reward) for session in group.sessions] == [
            (f"step-{group.index}-{place}", float(place)) for place in range(2)
        ]
        assert not group.is_short
        seen.append(group.index)
    assert sorted(seen) == [0, 1, 2]
    assert len(gateway.acked) == 6
    assert not gateway.calls


async def test_enough_sessions_end_the_group_and_the_others_are_cut_off(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    (group,) = await all_of(SessionGroups(client, [0], Agents(gateway, 1.0, None, 1.0, None), n=4, need=2, name="a"))
    assert [session.id for session in group.sessions] == ["a-0-0", "a-0-2"]
    assert sorted(gateway.dropped) == ["a-0-1", "a-0-3"]
    assert not gateway.calls


async def test_a_session_that_is_read_while_others_end_is_kept(gateway: PlayedSessions, client: RolloutClient) -> None:
    gateway.read_s = {"a-0-0": 0.2}
    (group,) = await all_of(SessionGroups(client, [0], Agents(gateway, 0.0, 1.0, 2.0), n=3, name="a"))
    assert [session.id for session in group.sessions] == ["a-0-1", "a-0-2", "a-0-0"]
    assert not group.is_short


async def test_the_deadline_freezes_what_is_open_and_delivers_it(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    (group,) = await all_of(SessionGroups(client, [0], Agents(gateway, 1.0, None), n=2, deadline_s=0.3, name="a"))
    assert [(session.id, session.reward, session.state) for session in group.sessions] == [
        ("a-0-0", 1.0, "frozen"),
        ("a-0-1", None, "frozen"),
    ]
    assert group.late == {"a-0-1"}
    assert not group.is_short


async def test_a_failed_agent_costs_its_session_and_is_no_reward(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    agents = Agents(gateway, ValueError("no sandbox"), TimeoutError("its own"), 1.0)
    (group,) = await all_of(SessionGroups(client, [0], agents, n=3, need=2, deadline_s=60.0))
    assert [session.reward for session in group.sessions] == [1.0]
    assert group.is_short
    assert group.dropped == {"failed": 2}
    assert sorted(map(repr, group.failures)) == ["TimeoutError('its own')", "ValueError('no sandbox')"]
    assert not gateway.calls


async def test_a_session_of_old_weights_is_dropped_and_counted(gateway: PlayedSessions, client: RolloutClient) -> None:
    for newest, kept in ((5, 2), (6, 0)):
        gateway.version = newest
        (group,) = await all_of(SessionGroups(client, [0], Agents(gateway, 0.0, 1.0), n=2, max_staleness=2))
        assert len(group.sessions) == kept
        assert group.dropped == ({} if kept else {"stale": 2})
        assert group.is_short is not bool(kept)


async def test_a_group_that_ages_while_it_waits_is_looked_at_again(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    async for group in SessionGroups(client, [0, 1], Agents(gateway, 1.0), n=1, max_staleness=0, in_work=2):
        if gateway.version == 3:
            assert len(group.sessions) == 1
            async with asyncio.timeout(5.0):
                while "frozen" not in {gateway.states[name] for name in gateway.calls if name[-3] != str(group.index)}:
                    await asyncio.sleep(0.01)
            gateway.version = 4
        else:
            assert group.dropped == {"stale": 1}


async def test_a_session_with_nothing_to_train_is_dropped_and_counted(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    async def cut_off(_: int, session: OpenSession) -> float:
        gateway.calls[session.id].append(call(0, mask="cut"))
        return 1.0

    (group,) = await all_of(SessionGroups(client, [0], cut_off, n=1))
    assert (group.sessions, group.dropped) == ([], {"untrainable": 1})


async def test_a_trainer_that_restarts_runs_no_agent_again_that_had_ended(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    first = Agents(gateway, 1.0)
    async for _ in SessionGroups(client, [0, 1, 2], first, n=1, name="run"):
        break  # dies with the first group in hand
    gateway.calls["run-1-0"], gateway.states["run-1-0"] = [call(0)], "open"
    again = Agents(gateway, 1.0)
    groups = await all_of(SessionGroups(client, [0, 1, 2], again, n=1, name="run"))
    assert [len(group.sessions[0].calls) for group in groups] == [1, 1, 1]
    assert again.ran == ["run-1-0", "run-2-0"]
    assert "run-1-0" in gateway.dropped  # its agent had died with the trainer


async def test_a_gateway_that_is_away_for_a_while_costs_nothing(gateway: PlayedSessions, client: RolloutClient) -> None:
    gateway.away, gateway.breaks = 3, 2
    (group,) = await all_of(SessionGroups(client, [0], Agents(gateway, 1.0), n=1))
    assert len(group.sessions) == 1


async def test_a_session_that_the_gateway_has_lost_costs_that_session(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    async def lost(_: int, session: OpenSession) -> None:
        gateway.calls.pop(session.id)

    (group,) = await all_of(SessionGroups(client, [0], lost, n=1))
    assert group.dropped == {"lost": 1}
    assert group.is_short


async def test_a_session_that_a_late_call_began_again_is_not_taken_for_the_whole(
    gateway: PlayedSessions, client: RolloutClient
) -> None:
    """A gateway without a ledger has forgotten its first calls."""

    async def goes_on(_: int, session: OpenSession) -> float:
        gateway.calls[session.id], gateway.began = [call(0, root_reason="changed")], 99.5
        return 1.0

    (group,) = await all_of(SessionGroups(client, [0], goes_on, n=1))
    assert (group.sessions, group.dropped) == ([], {"lost": 1})
    assert not gateway.calls


async def test_a_refusal_that_no_session_can_help_is_raised(gateway: PlayedSessions, client: RolloutClient) -> None:
    gateway.refuses = True
    with pytest.raises(NotAllowed, match="a key is needed"):
        await all_of(SessionGroups(client, [0], Agents(gateway, 1.0), n=1))


async def test_numbers_that_make_no_group_are_refused(client: RolloutClient, gateway: PlayedSessions) -> None:
    for wrong in ({"n": 0}, {"n": 2, "need": 3}, {"n": 2, "need": 0}, {"n": 1, "in_work": 0}):
        with pytest.raises(InvalidRequest, match="must be"):
            SessionGroups(client, [0], Agents(gateway), **wrong)  # type: ignore[arg-type]
