"""verl trains on sessions of an agent, as examples/verl_agent_cpu.sh has it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from examples import verl_agent
from tests.rigs.rig import MAX_MODEL_LEN, Rig
from tests.rigs.sessions import TURN
from tests.rigs.verl_run import Run, fleet
from tests.running.client_records import runs_client
from trainer_client.sessions.calls import OpenSession
from trainer_client.verl.llm_client import GatewayLLMClient
from trainer_client.verl.settings import Settings

pytestmark = pytest.mark.verl

STEPS = 24
RISE, CLOSE = 0.15, 1e-6


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


async def test_an_agent_loop_returns_all_rows_of_a_session_and_that_of_its_last_call_at_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.open_group()
    for _ in range(2):
        await rig.update()
    said = list[str]()

    async def two_conversations(asked: list[dict[str, str]], session: OpenSession) -> float:
        main = [*asked, {"role": "assistant", "content": ""}, {"role": "user", "content": "go on"}]
        for messages in (asked, main, [{"role": "user", "content": "another task"}]):
            body = TURN | {"messages": messages}
            headers = {"Authorization": f"Bearer {session.key}"}
            async with rig.client.post(f"{session.url}/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
                said.append((await response.json())["choices"][0]["message"]["content"])
            main[1]["content"] = said[0]
        return 0.5

    monkeypatch.setattr(verl_agent, "solve", two_conversations)
    rollout = SimpleNamespace(prompt_length=16, response_length=TURN["max_tokens"] + 1)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    client = GatewayLLMClient(config, Settings(url=rig.url), version_of_step_0=1, max_model_len=MAX_MODEL_LEN)
    loop = object.__new__(verl_agent.SortAgentLoop)  # verl's own begin reads a tokenizer
    loop.server_manager, loop.rollout_config = client, rollout
    try:
        first, last = await loop.run({}, raw_prompt=[{"role": "user", "content": "a task"}])
    finally:
        await client.close()
    assert (first.num_turns, last.num_turns) == (4, 2)
    assert [row.reward_score for row in (first, last)] == [0.5, 0.5]
    # It is cut at verl's length, where the user's words have begun.
    assert first.response_mask == [1] * TURN["max_tokens"] + [0]
    assert len(first.response_ids) == len(first.response_logprobs) == rollout.response_length
    assert last.extra_fields["min_global_steps"] == last.extra_fields["max_global_steps"] == 1
    assert (await rig.get("/v1/sessions"))[1]["sessions"] == []
    page = await (await rig.client.get(f"{rig.url}/metrics")).text()
    assert f'session_tokens_total{{step="captured"}} {3 * TURN["max_tokens"]}.0' in page


@pytest.mark.slow
@runs_client(
    "verl main_ppo, agent",
    "verl",
    ran="examples/verl_agent_cpu.sh: GRPO on sessions of an agent with a tool",
    against="2 x vLLM, CPU",
)
def test_the_reward_rises_by_sessions_of_an_agent(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with fleet(tmp_path) as served:
        run = Run("verl_agent_cpu.sh", tmp_path, served.url, f"trainer.total_training_steps={STEPS}")
        steps = run.to_end(steps=STEPS)
        assert served.ask("/v1/sessions")["sessions"] == []
    rewards = [step["critic/score/mean"] for step in steps]
    risen = mean(rewards[-8:]) - mean(rewards[:4])
    ratios = [step["rollout_corr/rollout_is_mean"] for step in steps]
    print("rewards", [round(one, 3) for one in rewards])
    print("importance ratios", ratios)
    assert risen > RISE
    assert all(abs(ratio - 1) <= CLOSE for ratio in ratios)
    # On-policy: the steps of the recorded weight versions are the trainer's.
    assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps] == [0] * STEPS
    # The tool has spoken between two turns, and is not trained.
    assert [step["training/num_turns/max"] for step in steps] == [4] * STEPS
    record_property("fact", f"reward {risen:+.2f} over {STEPS} steps")
