"""The reply to a prompt: tokens, log-probabilities, samples, ends."""

import asyncio
import json
import re
from typing import Any

import pytest

from engines.types import EngineKind
from tests.engines.conformance.lacks import declared, lack_of, not_run
from tests.engines.conformance.subject import CHAT, PLAIN, PROMPT, REQUEST_S, Json, Subject
from tests.rigs.calls import chunks_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_it_says_what_it_is(engine: Subject) -> None:
    await engine.engine.health(REQUEST_S)
    (card,) = (await engine.ask("/v1/models"))["data"]
    assert card["id"] == engine.info.model == engine.config.served_name
    assert (await engine.ask("/version"))["version"] == engine.info.engine_version
    assert (await engine.ask("/get_world_size"))["world_size"] == engine.config.world_size
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/pause", "/resume"} <= engine.info.capabilities


async def test_token_ids_go_in_and_come_out(engine: Subject) -> None:
    reply = await engine.complete(max_tokens=12)
    (choice,) = reply["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 12
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    usage = reply["usage"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert counts == (len(PROMPT), 12, len(PROMPT) + 12)


@pytest.mark.parametrize("count", [0, 3], ids=["sampled", "top 3"])
async def test_logprobs_are_aligned_with_token_ids(engine: Subject, count: int) -> None:
    choice = await engine.choice(logprobs=count, temperature=1.0, seed=3, return_tokens_as_token_ids=True)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    for name, logprob, top in zip(*columns, strict=True):
        assert top[name] == logprob <= 0, "the sampled token is not among those told"
        assert count <= len(top) <= count + 1
        assert count == 0 or max(top.values()) == sorted(top.values())[-1]


async def test_logprobs_of_scoring_are_those_of_generation(engine: Subject) -> None:
    choice = await engine.choice(logprobs=0, temperature=1.0, seed=4, max_tokens=24)
    scored = await engine.logprobs_of(PROMPT + choice["token_ids"])
    made = choice["logprobs"]["token_logprobs"]
    assert scored[len(PROMPT) - 1 :] == pytest.approx(made, abs=engine.tolerance)


async def test_prompt_logprobs_tell_each_token_of_the_prompt(engine: Subject) -> None:
    first, *rest = (await engine.choice(prompt_logprobs=2, max_tokens=1))["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip(PROMPT[1:], rest, strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
        assert 2 <= len(entry) <= 3


async def test_a_greedy_answer_is_the_same_each_time(engine: Subject) -> None:
    assert await engine.token_ids(max_tokens=24) == await engine.token_ids(max_tokens=24)


async def test_samples_come_in_one_reply_and_differ(engine: Subject) -> None:
    reply = await engine.complete(n=4, temperature=1.5, max_tokens=24)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    samples = [tuple(choice["token_ids"]) for choice in reply["choices"]]
    assert len(set(samples)) == 4
    assert reply["usage"]["completion_tokens"] == 4 * 24
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)


async def test_the_same_seed_gives_the_same_sample(engine: Subject) -> None:
    one, again, other = [await engine.token_ids(seed=seed, temperature=1.5, max_tokens=24) for seed in (7, 7, 8)]
    assert one != other
    if lack := lack_of("seed", engine):
        assert one != again
        declared(lack)
    assert one == again


async def test_a_completion_ends_at_the_end_token_unless_told_to_ignore_it(engine: Subject) -> None:
    end = await _wants_to_end(engine)
    ended = await engine.choice(ignore_eos=False, max_tokens=200, **end)
    assert ended["finish_reason"] == "stop"
    assert len(ended["token_ids"]) < 200
    ignored = await engine.choice(ignore_eos=True, max_tokens=40, **end)
    assert (ignored["finish_reason"], len(ignored["token_ids"])) == ("length", 40)


async def test_a_completion_has_at_least_min_tokens(engine: Subject) -> None:
    end = await _wants_to_end(engine)
    choice = await engine.choice(ignore_eos=False, min_tokens=9, max_tokens=200, **end)
    assert 9 <= len(choice["token_ids"]) < 200
    assert choice["finish_reason"] == "stop"


async def test_a_stop_token_ends_a_completion(engine: Subject) -> None:
    await _stops(engine, ignore_eos=False)


async def test_a_stop_token_ends_a_completion_that_ignores_the_end_token(engine: Subject) -> None:
    if lack := lack_of("stop_token_ids with ignore_eos", engine):
        assert "stop_token_ids" in await engine.refusal(stop_token_ids=[5], ignore_eos=True)
        declared(lack)
    await _stops(engine, ignore_eos=True)


@pytest.mark.parametrize("included", [False, True], ids=["cut off", "included"])
async def test_a_stop_string_ends_a_completion(engine: Subject, included: bool) -> None:
    text = (await engine.choice(logit_bias=PLAIN))["text"]
    stop = text[3:6]
    assert len(stop) == 3, f"the model writes no plain text: {text!r}"
    choice = await engine.choice(logit_bias=PLAIN, stop=[stop], include_stop_str_in_output=included)
    end = text.index(stop)
    assert choice["text"] == text[: end + 3 if included else end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("asked", "form"),
    [({"regex": "[0-9]{4}"}, r"[0-9]{4}"), ({"json": {"type": "integer"}}, r"-?[0-9]+")],
    ids=["regex", "json schema"],
)
async def test_a_grammar_is_followed(engine: Subject, asked: Json, form: str) -> None:
    fields = {"structured_outputs": asked, "ignore_eos": False, "max_tokens": 40}
    if lack := lack_of("grammar", engine):
        assert "structured_outputs" in await engine.refusal(**fields)
        declared(lack)
    if engine.config.extra.get("grammar_backend") == "none":
        not_run("the engine was started with grammar_backend none")
    choice = await engine.choice(**fields)
    assert re.match(form, choice["text"].strip()), choice["text"]
    if "json" in asked and choice["finish_reason"] == "stop":
        assert type(json.loads(choice["text"])) is int


async def test_text_becomes_tokens_and_text_again(engine: Subject) -> None:
    model = engine.info.model
    text = (await engine.ask("/detokenize", {"model": model, "tokens": PROMPT}))["prompt"]
    assert text
    tokens = (await engine.ask("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}))["tokens"]
    assert tokens == PROMPT
    assert (await engine.choice(prompt=text, max_tokens=4))["token_ids"] == await engine.token_ids(max_tokens=4)


async def test_a_conversation_is_answered_whole_and_streamed(engine: Subject) -> None:
    if not _has_chat_template(engine):
        not_run("the model has no chat template")
    message = {"role": "user", "content": "312"}
    body = {"model": engine.info.model, "messages": [message], "max_tokens": 24, "temperature": 0}
    whole = await engine.engine.generate(CHAT, body | {"return_token_ids": True}, REQUEST_S)
    (choice,) = whole["choices"]
    assert choice["message"]["role"] == "assistant"
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    chunks = [chunk async for chunk in chunks_of(engine.engine, CHAT, body, REQUEST_S)]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert "".join(part["delta"].get("content") or "" for part in parts) == choice["message"]["content"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]


async def test_its_page_of_metrics_counts_tokens(engine: Subject) -> None:
    if engine.config.disable_log_stats:
        not_run("the engine was started with disable_log_stats")
    before = await _settled_tokens(engine, 0)
    await engine.token_ids(max_tokens=20)
    assert await _settled_tokens(engine, before + 20) == before + 20


async def _stops(engine: Subject, **fields: Any) -> None:
    """At a token that it is told to stop at, and not before."""
    token_ids = await engine.token_ids(logit_bias=PLAIN, **fields)
    places = range(len(token_ids) - 1)  # the last one ends it anyway
    place = max(place for place in places if token_ids[place] not in token_ids[:place])
    choice = await engine.choice(logit_bias=PLAIN, stop_token_ids=[token_ids[place]], **fields)
    assert choice["token_ids"] == token_ids[: place + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_ids[place])


async def _wants_to_end(engine: Subject) -> Json:
    """Fields with which the end token comes by itself, and soon."""
    if engine.kind is EngineKind.SIM:
        return {}  # one token in 32 is the end
    return {"logit_bias": {str(engine.end_token_id): 100}}


def _has_chat_template(engine: Subject) -> bool:
    folder = engine.model_folder
    if folder is None or (folder / "chat_template.jinja").is_file():
        return True
    return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())


async def _settled_tokens(engine: Subject, least: float) -> float:
    """The tokens that its page counts, at least so many, once it counts no more: a little after it has answered."""
    async with asyncio.timeout(REQUEST_S):
        found, before = await _generation_tokens(engine), -1.0
        while found < least or found != before:
            await asyncio.sleep(engine.still_s)
            found, before = await _generation_tokens(engine), found
        return found


async def _generation_tokens(engine: Subject) -> float:
    prefix = "sglang" if engine.kind is EngineKind.SGLANG else "vllm"
    page = await engine.engine.metrics(REQUEST_S)
    found = re.findall(rf"^{prefix}:generation_tokens_total\{{.*\}} (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))
