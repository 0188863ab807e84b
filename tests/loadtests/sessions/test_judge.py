"""The judge of sessions: it finds nothing in a right record, and every kind of damage to one."""

import copy
import random
from typing import Any

import aiohttp
import pytest

from engines.config import SimConfig
from loadtests.sessions.agents import Agent
from loadtests.sessions.judge import records_of
from loadtests.sessions.oracle import Verdict, judge
from sim.model import SimModel
from tests.rigs.rig import Rig, StartRig
from trainer_client import RolloutClient, Sessions

Json = dict[str, Any]

MODEL = SimModel.of(SimConfig())


@pytest.fixture
async def rig(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr("tests.rigs.rig.MAX_MODEL_LEN", 100_000)
    return await start_rig(2, sim={"decode_step_s": 0.0})


async def worked(rig: Rig, dialect: str) -> tuple[list[Json], Agent]:
    """The record of a session whose agent had ten turns, and the agent."""
    async with RolloutClient(rig.url) as client, aiohttp.ClientSession(rig.url) as http:
        sessions = Sessions(client)
        opened = await sessions.begin(f"judged-{dialect}")
        agent = Agent(http, "", opened.key, dialect, random.Random(1), max_tokens=24)
        await agent.work(10, "A task")
        await sessions.freeze(opened.id, 1.0)
        return await records_of(sessions, opened.id), agent


def differences(records: list[Json], agent: Agent) -> dict[str, int]:
    verdict = Verdict()
    judge(MODEL, records[0]["id"], records, agent.answered, verdict)
    return dict(verdict.differences)


@pytest.mark.parametrize("dialect", ["messages", "responses", "chat"])
async def test_a_right_record_has_no_difference(rig: Rig, dialect: str) -> None:
    records, agent = await worked(rig, dialect)
    assert len(records) - 2 == len(agent.answered) > 0
    assert any(call["parent"] is not None for call in records[1:-1])
    assert differences(records, agent) == {}


async def test_each_damage_is_a_difference(rig: Rig) -> None:
    records, agent = await worked(rig, "messages")
    child = next(place for place, call in enumerate(records) if call.get("parent") is not None)

    def damaged(**fields: Any) -> list[Json]:
        whole = copy.deepcopy(records)
        whole[child] |= fields
        return whole

    call = records[child]
    assert "log-probs" in differences(damaged(logprobs=[value - 0.01 for value in call["logprobs"]]), agent)
    assert "log-probs" in differences(damaged(prompt_token_ids=[9, *call["prompt_token_ids"][1:]]), agent)
    assert "spans" in differences(damaged(weight_versions=[]), agent)
    other = [{"version": 7, "start": 0, "end": len(call["token_ids"])}]
    assert "log-probs" in differences(damaged(weight_versions=other), agent)
    assert "prompt" in differences(damaged(prompt_tokens=call["prompt_tokens"] + 1), agent)
    whole = [*(one for turn in records[1:child] for one in (*turn["prompt_token_ids"], *turn["token_ids"]))]
    root = {"parent": None, "root_reason": "changed", "prompt_token_ids": [*whole, *call["prompt_token_ids"]]}
    assert "parent" in differences(damaged(**root), agent)
    assert "answers" in differences([*records[:-2], {"type": "end", "calls": len(records) - 3}], agent)
