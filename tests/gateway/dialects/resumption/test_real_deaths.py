"""kill -9 of a real vLLM replica on CPU amid requests of every form: replies are those of an undisturbed fleet."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from examples.tiny_model.task import COMMITTED
from tests.rigs.real_vllm import RealFleet, fleet, until_generating

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

MODEL = str(COMMITTED)
TOKENS = 240
PROMPTS = [[2, *(5 + digit for digit in digits), 3] for digits in ((3, 1, 2), (9, 8), (4, 4, 0, 1), (7, 5, 6))]
GREEDY: Json = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
# vLLM refuses several greedy samples; at this temperature each is the greedy one.
GROUPS = GREEDY | {"temperature": 1e-4, "n": 2}
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


def chat_streamed(real: RealFleet, place: int) -> list[Sample]:
    ids, text, logprobs = list[int](), "", list[float]()
    for chunk in real.stream("/v1/chat/completions", conversation(place)):
        for choice in chunk["choices"]:
            ids += choice.get("token_ids") or []
            text += choice["delta"].get("content") or ""
            logprobs += scores(choice)
    return [(ids, text, logprobs)]


def scores(choice: Json) -> list[float]:
    return [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]


FORMS: dict[str, Callable[[RealFleet], list[Sample]]] = {
    "completions": lambda real: completions(real, GREEDY),
    "completions, n > 1": lambda real: completions(real, GROUPS),
    "streamed": lambda real: streamed(real, GREEDY),
    "streamed, n > 1": lambda real: streamed(real, GROUPS),
    **{f"chat {place}": partial(chat, place=place) for place in range(4)},
    **{f"chat streamed {place}": partial(chat_streamed, place=place) for place in range(4)},
}
KNOWN_TO_DIFFER = {"completions, n > 1", "streamed, n > 1"}
SAMPLES = 4 + 8 + 4 + 8 + 4 + 4


def test_requests_whose_replica_is_killed_come_as_if_it_had_lived(real: RealFleet) -> None:
    """The fleet has one replica afterwards."""
    with ThreadPoolExecutor(len(FORMS)) as pool:
        undisturbed = dict(zip(FORMS, pool.map(lambda form: form(real), FORMS.values()), strict=True))
        asked = {name: pool.submit(form, real) for name, form in FORMS.items()}
        until_generating(real, SAMPLES, tokens=TOKENS // 3)
        real.kill(0)
        continued = {name: future.result() for name, future in asked.items()}
    differing = set()
    for name, samples in undisturbed.items():
        for before, after in zip(samples, continued[name], strict=True):
            assert len(after[0]) == TOKENS, name
            if name in KNOWN_TO_DIFFER and after[0] != before[0]:
                differing.add(name)
                continue
            assert after[0] == before[0], name
            assert after[1] == before[1], name
            assert after[2] == pytest.approx(before[2], abs=1e-3), name
    retries = [line for line in real.text("/metrics")[1].splitlines() if "retries_total" in line and "failed" in line]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in retries) >= 3  # prompts; a fast engine has ended some
    if differing:
        pytest.xfail(f"open defect: after a death {sorted(differing)} have a token that temperature 1e-4 cannot draw")
