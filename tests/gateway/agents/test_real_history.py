"""Histories over a real vLLM (CPU), whose own routes render turns and parse answers: Qwen3's template and parsers."""

import asyncio
import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engines.errors import EngineRefused
from gateway.agents.history import History
from gateway.agents.tails import Tails
from gateway.agents.turn import Turn
from gateway.dialects.rendering import DERENDER, RENDER
from tests.gateway.agents.test_history import (
    CALL,
    END,
    GO_ON,
    GO_ON_TEXT,
    RESULT,
    RESULT_TEXT,
    SYSTEM,
    THOUGHT,
    TOOLS,
    USER,
    call,
    end_of,
    user,
)
from tests.rigs.engines.real_vllm import RealFleet, fleet
from tests.rigs.sessions import record_at
from tests.rigs.templated import Templated, chat_template, tokenizer

pytestmark = pytest.mark.vllm

Json = dict[str, Any]
QWEN3 = chat_template("qwen3")
COMPACT = '{"path":1.0}'
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}


def words() -> PreTrainedTokenizerFast:
    return tokenizer(QWEN3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says anything."""
    folder = tmp_path_factory.mktemp("random-qwen3")
    tokens = PreTrainedTokenizerFast(tokenizer_object=words()._tokenizer, eos_token=END)
    tokens.chat_template = QWEN3
    tokens.save_pretrained(folder)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    end = tokens.convert_tokens_to_ids(END)
    config = Qwen3Config(vocab_size=512, eos_token_id=end, bos_token_id=None, **shape, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def real(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with fleet(model, tmp_path_factory.mktemp("logs"), 1, {"extra": PARSERS, "max_model_len": 8192}) as running:
        yield running


@dataclass(frozen=True)
class OfEngine(Templated):
    """Asks one engine itself."""

    engine: RealFleet | None = None

    async def render(self, chat: Json) -> Json | None:
        return await asyncio.to_thread(self._answered, RENDER, chat)

    async def message(self, chat: Json, prompt: list[int], choice: Json) -> Json:
        reply = {"request_id": "", "prompt_token_ids": prompt, "choices": [choice]}
        body = {"model": chat["model"], "generate_response": reply, "chat_request": chat, "prompt_token_ids": prompt}
        message: Json = (await asyncio.to_thread(self._answered, DERENDER, body))["choices"][0]["message"]
        return message

    def _answered(self, path: str, body: Json) -> Json:
        assert self.engine is not None
        status, reply = self.engine.call(path, body)
        if status != 200:
            raise EngineRefused(str(reply), status=status, body=reply)
        told: Json = reply
        return told


@pytest.mark.parametrize(
    ("said", "new", "rest"),
    [
        (THOUGHT + CALL + END, RESULT, RESULT_TEXT),
        (f"I look.\n\n{call(COMPACT)}{END}", RESULT, RESULT_TEXT),
        (f"{THOUGHT}Two files.\n{END}", GO_ON, GO_ON_TEXT),
        (f"{THOUGHT}<tool_call>\nbroken\n</tool_call>{END}", GO_ON, GO_ON_TEXT),
    ],
    ids=["call", "text and call", "text", "call that does not parse"],
)
async def test_new_messages_follow_the_sampled_ids(
    real: RealFleet, model: Path, said: str, new: Json, rest: str
) -> None:
    nothing: Any = None
    engine = replace(real, url=real.replicas[0].url)
    rendering = OfEngine(nothing, nothing, 0.0, template=QWEN3, tokens=words(), engine=engine)
    ids: list[array[int]] = []
    history, tails = History(lambda number: ids[number]), Tails(rendering)
    turn = Turn(model=str(model), messages=[SYSTEM, USER], tools=TOOLS)
    for number in range(3):
        prompt = await history.prompt(turn, tails)
        assert prompt is not None
        if number:
            assert (prompt.parent, prompt.token_ids[: len(ids[-1])]) == (number - 1, ids[-1].tolist())
            assert rendering.decoded(prompt.token_ids[len(ids[-1]) :]) == rest
        sampled = rendering.encoded(said)
        choice = {"index": 0, "token_ids": sampled[:-1], "finish_reason": "stop", "stop_reason": None, "logprobs": None}
        chat = {"model": turn.model, "messages": turn.messages, "tools": turn.tools}
        message = await rendering.message(chat, prompt.token_ids, choice)
        assert bool(message.get("tool_calls")) == (new is RESULT)
        ids.append(array("i", prompt.token_ids + sampled))
        history.add(number, history.digest(turn, message), end_of(prompt.token_ids, sampled))
        results = [new | {"tool_call_id": one["id"]} for one in message.get("tool_calls") or ()]
        replayed = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        turn = replace(turn, messages=[*turn.messages, {"content": None} | replayed, *(results or [new])])


def test_a_session_of_noise_is_one_path_of_ids(real: RealFleet, model: Path) -> None:
    messages = [user("What is here?")]
    for _ in range(3):
        body = {"model": str(model), "max_tokens": 24, "messages": messages}
        status, reply = real.call("/sessions/noise/v1/messages", body)
        assert status == 200, reply
        messages += [{"role": "assistant", "content": reply["content"]}, GO_ON]
    assert real.call("/v1/sessions/noise/freeze", {})[0] == 200
    _, calls = asyncio.run(record_at(real.url, "noise"))
    assert [one["parent"] for one in calls] == [None, 0, 1]
    for one, after in itertools.pairwise(calls):
        ended = one["token_ids"][-1] == words().convert_tokens_to_ids(END)
        assert words().decode(after["prompt_token_ids"]) == ("" if ended else END) + GO_ON_TEXT
