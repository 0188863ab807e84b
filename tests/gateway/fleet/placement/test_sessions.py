"""The turns of one agent: on one replica while that is well, elsewhere when it is not."""

import pytest

from engines.errors import InvalidRequest
from gateway.fleet.placement.routing import Recent
from gateway.fleet.placement.sessions import Identity, identity_of, session_key, session_of
from tests.rigs.rig import Json, Rig

TURN = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def test_the_least_recently_used_are_forgotten_beyond_the_limit() -> None:
    homes = Recent[str, str](limit=2)
    for agent in ("a", "b", "a", "c"):
        homes.note(agent, "engine-1")
    assert [homes.get(agent) for agent in "abc"] == ["engine-1", None, "engine-1"]


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"X-Session-ID": "s"}, {"user": "u"}, "s"),
        ({"X-SMG-Routing-Key": "s"}, {}, "s"),
        ({"X-Claude-Code-Session-Id": "s"}, {}, "s"),
        ({"thread-id": "s"}, {"prompt_cache_key": "k"}, "s"),
        ({"X-Session-ID": "header"}, {"session_id": "body"}, "body"),
        ({}, {"vllm_xargs": {"session_id": "s"}}, "s"),
        ({}, {"user": "u", "prompt_cache_key": "k"}, "k"),
        ({}, {"user": "u"}, "u"),
        ({}, {"user": None, "vllm_xargs": None}, ""),
    ],
)
def test_header_or_field_names_the_session(headers: dict[str, str], body: Json, session: str) -> None:
    assert session_of("mine", headers, body) == (session and session_key("mine", session))


def test_equal_names_of_two_clients_are_two_sessions() -> None:
    assert session_of("mine", {}, {"user": "u"}) != session_of("yours", {}, {"user": "u"})


def test_a_long_name_is_hashed() -> None:
    names = [session_of("mine", {}, {"session_id": "x" * 5000 + end}) for end in ("a", "a", "b")]
    assert names[0] == names[1] != names[2]
    assert len(names[0]) <= 256


@pytest.mark.parametrize("value", [7, ["a"]])
def test_a_name_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="session_id = ") as caught:
        session_of("mine", {}, {"session_id": value})
    assert caught.value.param == "session_id"


@pytest.mark.parametrize(
    ("named", "headers", "body", "identity"),
    [
        ("path", {"X-Session-Id": "header"}, {"prompt_cache_key": "field"}, Identity("path")),
        ("path", {"session-id": "s", "thread-id": "t", "x-codex-window-id": "t:1"}, {}, Identity("path", "t", "t:1")),
        ("", {"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"}, {}, Identity("s", "a")),
        ("", {"session-id": "s", "thread-id": "s"}, {"prompt_cache_key": "s"}, Identity("s")),
        ("", {}, {"metadata": {"user_id": '{"session_id": "s"}'}}, Identity("s")),
        ("", {}, {"metadata": {"user_id": "[7]"}, "prompt_cache_key": 7, "user": "u"}, None),
    ],
)
def test_a_path_or_key_names_the_session_of_an_agent_and_else_its_harness(
    named: str, headers: dict[str, str], body: Json, identity: Identity | None
) -> None:
    assert identity_of(named, headers, body) == identity


async def test_the_turns_of_an_agent_go_to_one_replica(rig: Rig) -> None:
    for _ in range(5):
        await rig.post("/v1/chat/completions", TURN, headers={"X-Session-ID": "agent"})
    assert sorted(replica.placed for replica in rig.fleet.replicas) == [0, 5]


async def test_a_batch_that_names_a_session_is_spread_all_the_same(rig: Rig) -> None:
    await rig.complete([[5, 6], [7, 8]], user="trainer")
    assert [replica.placed for replica in rig.fleet.replicas] == [1, 1]


async def test_a_session_goes_on_elsewhere_when_its_replica_dies(rig: Rig) -> None:
    await rig.complete([5, 6, 7], session_id="agent")
    home = max(rig.fleet.replicas, key=lambda replica: replica.placed)
    await next(sim for sim in rig.replicas if sim.info.replica_id == home.replica_id).kill()
    await rig.complete([5, 6, 7], session_id="agent")
    other = next(replica for replica in rig.fleet.replicas if replica is not home)
    assert other.placed == 1
