"""A client of /v1/rollouts for tests: sends groups, reads events."""

from collections.abc import Sequence
from typing import Any

import orjson

from tests.rigs.rig import Json, Rig

GROUP = {"prompt": [5, 6, 7]}
SAMPLING = {"max_tokens": 8, "ignore_eos": True}


def body(groups: Sequence[Json] = (GROUP,), **fields: Any) -> Json:
    return {"sampling": SAMPLING, "groups": list(groups), **fields}


async def submitted(rig: Rig, groups: Sequence[Json] = (GROUP,), **fields: Any) -> list[Json]:
    """All events of a submission, from its POST; the head is the first."""
    async with rig.client.post(rig.url + "/v1/rollouts", json=body(groups, **fields)) as response:
        content = await response.read()
        assert response.status == 200, content
    return lines(content)


async def detached(rig: Rig, name: str, groups: Sequence[Json] = (GROUP,), **fields: Any) -> Json:
    """The head of a submission that runs on."""
    status, head = await rig.post("/v1/rollouts", body(groups, id=name, stream=False, **fields))
    assert status == 202, head
    return head


async def read(rig: Rig, name: str, cursor: int | None = None) -> list[Json]:
    """The events of a submission after a cursor, to its end."""
    query = {} if cursor is None else {"cursor": str(cursor)}
    async with rig.client.get(f"{rig.url}/v1/rollouts/{name}", params=query) as response:
        content = await response.read()
        assert response.status == 200, content
    return lines(content)


async def ack(rig: Rig, name: str, cursor: int) -> Json:
    status, head = await rig.post(f"/v1/rollouts/{name}/ack", {"cursor": cursor})
    assert status == 200, head
    return head


def lines(content: bytes) -> list[Json]:
    return [orjson.loads(line) for line in content.splitlines()]


def of_type(events: Sequence[Json], kind: str) -> list[Json]:
    return [event for event in events if event["type"] == kind]


def outcomes(events: Sequence[Json]) -> dict[int, str]:
    return {event["group"]: event["outcome"] for event in of_type(events, "group")}


def samples(events: Sequence[Json]) -> list[tuple[int, int]]:
    """Group and sample of each sample, in order of delivery."""
    return [(event["group"], event["sample"]) for event in of_type(events, "sample")]
