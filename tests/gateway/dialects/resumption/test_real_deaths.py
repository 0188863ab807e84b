"""kill -9 of a real vLLM replica on CPU amid requests of every form.

Greedy replies are those of an undisturbed fleet. Random ones, as groups are, have the log-probabilities that an engine
gives to the same tokens when it reads them, to each after all before it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer

from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import RealFleet, fleet, gathered, standing_amid

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

MODEL = str(COMMITTED)
TOKENS = 240
PROMPTS = [[2, *(5 + digit for digit in digits), 3] for digits in ((3, 1, 2), (9, 8), (4, 4, 0, 1), (7, 5, 6))]
GREEDY: Json = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
# vLLM refuses several greedy samples, and raises a temperature near 0 to 0.01, at which a near tie goes either way.
SAMPLES_EACH = 2
GROUPS = GREEDY | {"temperature": 1.0, "n": SAMPLES_EACH}
Sample = tuple[list[int], str, list[float]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with fleet(COMMITTED, tmp_path_factory.mktemp("logs")) as running:
        yield running


def completions(real: RealFleet, sampling: Json) -> list[Sample]:
    status, reply = real.call("/v1/completions", sampling | {"prompt": PROMPTS, "logprobs": 0})
    assert status == 200, reply
    return [(one["token_ids"], one["text"], one["logprobs"]["token_logprobs"]) for one in reply["choices"]]


def streamed(real: RealFleet, sampling: Json) -> list[Sample]:
    samples: list[Sample] = [([], "", []) for _ in range(len(PROMPTS) * sampling.get("n", 1))]
    for chunk in real.stream("/v1/completions", sampling | {"prompt": PROMPTS, "logprobs": 0}):
        for choice in chunk["choices"]:
            ids, text, logprobs = samples[choice["index"]]
            scores = (choice["logprobs"] or {}).get("token_logprobs") or []
            samples[choice["index"]] = (ids + (choice["token_ids"] or []), text + choice["text"], logprobs + scores)
    return samples


def conversation(place: int) -> Json:
    messages = [{"role": "user", "content": text} for text in ("312", "98", "4401", "756")[place : place + 1]]
    return GREEDY | {"messages": messages, "logprobs": True}


def chat(real: RealFleet, place: int) -> list[Sample]:
    status, reply = real.call("/v1/chat/completions", conversation(place))
    assert status == 200, reply
    return [(one["token_ids"], one["message"]["content"], scores(one)) for one in reply["choices"]]


def scores(choice: Json) -> list[float]:
    return [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]


def scores_of(real: RealFleet, prompt: list[int], token_ids: list[int]) -> list[float]:
    """The log-probabilities of tokens that an engine reads after the prompt."""
    asked = {"model": MODEL, "prompt": [prompt + token_ids], "max_tokens": 1, "prompt_logprobs": 0}
    status, reply = real.call("/v1/completions", asked)
    assert status == 200, reply
    rows = reply["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [row[str(token)]["logprob"] for token, row in zip(token_ids, rows, strict=True)]


FORMS: dict[str, Callable[[RealFleet], list[Sample]]] = {
    "completions": lambda real: completions(real, GREEDY),
    "streamed": lambda real: streamed(real, GREEDY),
    **{f"chat {place}": partial(chat, place=place) for place in range(4)},
}
GROUP_FORMS: dict[str, Callable[[RealFleet], list[Sample]]] = {
    "completions, n > 1": lambda real: completions(real, GROUPS),
    "streamed, n > 1": lambda real: streamed(real, GROUPS),
}
SAMPLES = 4 + 4 + 4 + 8 + 8


def test_agents_are_told_what_chat_says(real: RealFleet) -> None:
    """Here, since it takes the fleet as it is before a death."""
    asked = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "312"}]}
    _, said = real.call("/v1/chat/completions", asked | {"max_tokens": 40})
    _, message = real.call("/v1/messages", asked | {"max_tokens": 40})
    _, counted = real.call("/v1/messages/count_tokens", asked)
    sampling = {"model": MODEL, "temperature": 0, "max_output_tokens": 40}
    _, response = real.call("/v1/responses", sampling | {"input": asked["messages"]})
    text, usage = said["choices"][0]["message"]["content"], said["usage"]
    assert [block["text"] for block in message["content"]] == [text]
    assert response["output"][-1]["content"][0]["text"] == text
    assert counted["input_tokens"] == message["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert message["usage"]["output_tokens"] == response["usage"]["output_tokens"] == usage["completion_tokens"]


def test_requests_whose_replica_is_killed_come_as_if_it_had_lived(real: RealFleet) -> None:
    """The fleet has one replica afterwards."""
    asking = FORMS | GROUP_FORMS
    with ThreadPoolExecutor(len(asking)) as pool:
        undisturbed = dict(zip(FORMS, pool.map(lambda form: form(real), FORMS.values()), strict=True))
        with gathered(real, SAMPLES, TOKENS // 3):
            asked = {name: pool.submit(form, real) for name, form in asking.items()}
        with standing_amid(real):
            real.kill(0)
        continued = {name: future.result() for name, future in asked.items()}
    for name, samples in undisturbed.items():
        for alone, after in zip(samples, continued[name], strict=True):
            assert len(after[0]) == TOKENS, name
            assert after[0] == alone[0], name
            assert after[1] == alone[1], name
            assert after[2] == pytest.approx(alone[2], abs=1e-3), name
    decode = AutoTokenizer.from_pretrained(MODEL).decode
    for name in GROUP_FORMS:
        assert len(continued[name]) == SAMPLES_EACH * len(PROMPTS)
        for place, (token_ids, text, logprobs) in enumerate(continued[name]):
            assert len(token_ids) == TOKENS, name
            assert text == decode(token_ids, skip_special_tokens=True), name
            scored = scores_of(real, PROMPTS[place // SAMPLES_EACH], token_ids)
            assert logprobs == pytest.approx(scored, abs=1e-3), name
    retries = [line for line in real.text("/metrics")[1].splitlines() if "retries_total" in line and "failed" in line]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in retries) >= 3  # prompts; a fast engine has ended some
