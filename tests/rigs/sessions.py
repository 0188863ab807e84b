"""A trainer of /v1/sessions for tests, and the turns of its agents."""

from typing import Any

from loadtests.sessions.judge import records_of
from tests.rigs.rig import Json, Rig
from trainer_client import RolloutClient
from trainer_client.sessions.calls import Sessions
from trainer_client.sessions.records import Session

TURN: Json = {"model": "sim", "max_tokens": 6, "temperature": 0.0}


def turn(*said: str, **fields: Any) -> Json:
    """A body of /v1/messages: a user and the assistant speak in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(said)]
    return TURN | {"messages": messages} | fields


async def answered(rig: Rig, session: str, body: Json) -> tuple[int, Any]:
    """The status and the reply to a turn of a session; the text of one that is streamed."""
    async with rig.client.post(f"{rig.url}/sessions/{session}/v1/messages", json=body) as response:
        is_stream = response.content_type == "text/event-stream"
        return response.status, await (response.text() if is_stream else response.json())


async def said(rig: Rig, session: str, *before: str, **fields: Any) -> str:
    """The answer to a turn of a session."""
    status, reply = await answered(rig, session, turn(*before, **fields))
    assert status == 200, reply
    return "".join(block["text"] for block in reply["content"])


async def record(rig: Rig, session: str, key: str = "") -> tuple[Json, list[Json]]:
    """The head and the calls of a session, with ids and log-probs as numbers."""
    return await record_at(rig.url, session, key)


async def record_at(url: str, session: str, key: str = "") -> tuple[Json, list[Json]]:
    async with RolloutClient(url, api_key=key) as client:
        head, *calls, end = await records_of(Sessions(client), session)
    assert end == {"type": "end", "calls": len(calls)}
    return head, calls


async def read(rig: Rig, session: str) -> Session:
    """A session as a trainer's client has it."""
    async with RolloutClient(rig.url) as client:
        return await Sessions(client).read(session)


async def frozen(rig: Rig, session: str, **asked: Any) -> Json:
    status, head = await rig.post(f"/v1/sessions/{session}/freeze", asked)
    assert status == 200, head
    return head


def whole(calls: list[Json], number: int) -> list[int]:
    """The ids of a call's prompt and of what was sampled."""
    call = calls[number]
    before = [] if call["parent"] is None else whole(calls, call["parent"])
    return [*before, *call["prompt_token_ids"], *call["token_ids"]]


def masked(calls: list[Json]) -> list[str | None]:
    return [call["mask"] for call in calls]


def spans(call: Json) -> list[tuple[int, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in call["weight_versions"]]
