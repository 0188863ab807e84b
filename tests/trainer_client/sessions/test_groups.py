"""Groups of sessions against a gateway over simulated engines, which records what agents ask."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engines.errors import GatewayUnreachable, InvalidRequest, NotAllowed
from gateway.api import error_of
from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig
from tests.rigs.sessions import TURN
from trainer_client import RolloutClient, SessionGroups, Sessions, retries
from trainer_client.sessions.calls import OpenSession
from trainer_client.sessions.groups import SessionGroup


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(rig.url) as client:
        yield client


async def ask(rig: Rig, session: OpenSession, said: str = "hello") -> None:
    """A turn of an agent."""
    body = TURN | {"messages": [{"role": "user", "content": said}]}
    headers = {"Authorization": f"Bearer {session.key}"}
    async with rig.client.post(f"{session.url}/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()


class Agents:
    """Agents that each make one call, and then do what their place says: return a reward, raise, or stay."""

    def __init__(self, rig: Rig, *does: float | Exception | None) -> None:
        self._rig = rig
        self._does = does
        self.ran: list[str] = []

    async def __call__(self, task: int, session: OpenSession) -> float | None:
        self.ran.append(session.id)
        await ask(self._rig, session, f"task {task}")
        does = self._does[int(session.id.rpartition("-")[2])]
        if isinstance(does, Exception):
            raise does
        await asyncio.sleep(3600.0 if does is None else 0.05 * does)
        return does


async def kept(rig: Rig) -> dict[str, str]:
    """The states of the sessions that the gateway has."""
    _, listed = await rig.get("/v1/sessions")
    return {session["id"]: session["state"] for session in listed["sessions"]}


async def only(groups: SessionGroups[int]) -> SessionGroup[int]:
    (group,) = [group async for group in groups]
    return group


async def test_each_task_comes_as_a_group_with_rewards_and_is_acked_after_its_body(
    rig: Rig, client: RolloutClient
) -> None:
    prompts = {}
    async for group in SessionGroups(client, range(3), Agents(rig, 0.0, 1.0), n=2, in_work=2, name="step"):
        assert {session.id for session in group.sessions} <= set(await kept(rig))
        assert [(session.id, session.reward) for session in group.sessions] == [
            (f"step-{group.index}-{place}", float(place)) for place in range(2)
        ]
        (prompts[group.task],) = {tuple(session.calls[0].prompt_token_ids) for session in group.sessions}
        assert not group.is_short
    assert len({*prompts.values()}) == 3
    assert await kept(rig) == {}


async def test_enough_sessions_end_the_group_and_the_others_are_cut_off(rig: Rig, client: RolloutClient) -> None:
    group = await only(SessionGroups(client, [0], Agents(rig, 1.0, None, 1.0, None), n=4, need=2, name="a"))
    assert sorted(session.id for session in group.sessions) == ["a-0-0", "a-0-2"]
    assert await kept(rig) == {}


async def test_a_session_that_is_read_while_others_end_is_kept(
    rig: Rig, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = client._http.records

    async def slowly(path: str) -> Any:
        await asyncio.sleep(0.5 * path.endswith("a-0-0"))
        return await read(path)

    monkeypatch.setattr(client._http, "records", slowly)
    group = await only(SessionGroups(client, [0], Agents(rig, 0.0, 1.0, 2.0), n=3, name="a"))
    assert [session.id for session in group.sessions] == ["a-0-1", "a-0-2", "a-0-0"]
    assert not group.is_short


async def test_the_deadline_freezes_what_is_open_and_delivers_it(rig: Rig, client: RolloutClient) -> None:
    group = await only(SessionGroups(client, [0], Agents(rig, 1.0, None), n=2, deadline_s=1.0, name="a"))
    assert [(session.id, session.reward, session.state) for session in group.sessions] == [
        ("a-0-0", 1.0, "frozen"),
        ("a-0-1", None, "frozen"),
    ]
    assert group.late == {"a-0-1"}
    assert not group.is_short


async def test_a_failed_agent_costs_its_session_and_is_no_reward(rig: Rig, client: RolloutClient) -> None:
    agents = Agents(rig, ValueError("no sandbox"), TimeoutError("its own"), 1.0)
    group = await only(SessionGroups(client, [0], agents, n=3, need=2, deadline_s=60.0))
    assert [session.reward for session in group.sessions] == [1.0]
    assert group.is_short
    assert group.dropped == {"failed": 2}
    assert sorted(map(repr, group.failures)) == ["TimeoutError('its own')", "ValueError('no sandbox')"]
    assert await kept(rig) == {}


async def test_a_session_of_old_weights_is_dropped_and_counted(rig: Rig, client: RolloutClient) -> None:
    async def beside_updates(updates: int, session: OpenSession) -> float:
        await ask(rig, session)
        for _ in range(updates):
            await rig.update()
        return 1.0

    await rig.open_group()
    for updates, dropped in ((2, {}), (3, {"stale": 1})):
        group = await only(SessionGroups(client, [updates], beside_updates, n=1, max_staleness=2))
        assert group.dropped == dropped
        assert (len(group.sessions), group.is_short) == (1 - len(dropped), bool(dropped))


async def test_a_group_that_ages_while_it_waits_is_looked_at_again(rig: Rig, client: RolloutClient) -> None:
    await rig.open_group()
    seen = []
    async for group in SessionGroups(client, [0, 1], Agents(rig, 1.0), n=1, max_staleness=0, in_work=2):
        seen.append(group.dropped)
        if len(seen) == 1:
            await until(lambda: kept(rig), lambda found: [*found.values()] == ["frozen"] * 2)
            await rig.update()
    assert seen == [{}, {"stale": 1}]


async def test_a_session_with_nothing_to_train_is_dropped_and_counted(rig: Rig, client: RolloutClient) -> None:
    async def idle(_: int, session: OpenSession) -> float:
        return 1.0

    group = await only(SessionGroups(client, [0], idle, n=1))
    assert (group.sessions, group.dropped) == ([], {"untrainable": 1})


async def test_a_trainer_that_restarts_runs_no_agent_again_that_had_ended(rig: Rig, client: RolloutClient) -> None:
    async for _ in SessionGroups(client, [0, 1, 2], Agents(rig, 1.0), n=1, name="run"):
        break  # dies with the first group in hand
    await ask(rig, await Sessions(client).begin("run-1-0"))  # its agent has died with the trainer
    again = Agents(rig, 1.0)
    groups = [group async for group in SessionGroups(client, [0, 1, 2], again, n=1, name="run")]
    assert [len(group.sessions[0].calls) for group in groups] == [1, 1, 1]
    assert again.ran == ["run-1-0", "run-2-0"]


async def test_a_gateway_that_is_away_for_a_while_costs_nothing(
    rig: Rig, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, read, away, breaks = client._http.call, client._http.records, iter("aaa"), iter("bb")
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)

    async def called(*args: Any, **kwargs: Any) -> Any:
        if next(away, ""):
            raise error_of(502, "away")
        return await call(*args, **kwargs)

    async def broken_off(path: str) -> Any:
        if next(breaks, ""):
            raise GatewayUnreachable("the reply broke off")
        return await read(path)

    monkeypatch.setattr(client._http, "call", called)
    monkeypatch.setattr(client._http, "records", broken_off)
    group = await only(SessionGroups(client, [0], Agents(rig, 1.0), n=1))
    assert len(group.sessions) == 1


async def test_a_session_that_the_gateway_has_lost_costs_that_session(rig: Rig, client: RolloutClient) -> None:
    """A gateway without a ledger has forgotten it; a late call begins it again where `begins_again`."""

    async def lost(begins_again: int, session: OpenSession) -> float:
        await Sessions(client).drop(session.id)
        if begins_again:
            await ask(rig, await Sessions(client).begin(session.id))
        return 1.0

    for begins_again in (0, 1):
        group = await only(SessionGroups(client, [begins_again], lost, n=1))
        assert (group.sessions, group.dropped, group.is_short) == ([], {"lost": 1}, True)
    assert await kept(rig) == {}


async def test_a_refusal_that_no_session_can_help_is_raised(start_rig: StartRig) -> None:
    rig = await start_rig(gateway={"inference_keys": ["key"], "trusted_networks": []})
    async with RolloutClient(rig.url, api_key="another") as client:
        with pytest.raises(NotAllowed):
            await only(SessionGroups(client, [0], Agents(rig, 1.0), n=1))


async def test_numbers_that_make_no_group_are_refused(rig: Rig, client: RolloutClient) -> None:
    for wrong in ({"n": 0}, {"n": 2, "need": 3}, {"n": 2, "need": 0}, {"n": 1, "in_work": 0}):
        with pytest.raises(InvalidRequest, match="must be"):
            SessionGroups(client, [0], Agents(rig), **wrong)  # type: ignore[arg-type]
