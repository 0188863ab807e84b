"""The vLLM dialect over two real vLLM replicas on CPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm")

from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import RealFleet, fleet, gathered, greedy_token_ids, standing_amid

pytestmark = pytest.mark.vllm

MODEL = str(COMMITTED)
USER, ASSISTANT = 2, 3
DIGITS = {digit: 5 + digit for digit in range(10)}


def prompt(*digits: int) -> list[int]:
    return [USER, *(DIGITS[digit] for digit in digits), ASSISTANT]


PROMPTS = [prompt(3, 1, 2), prompt(9, 8), prompt(4, 4, 0, 1), prompt(7, 5, 6)]
COMPLETE: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "return_token_ids": True}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with fleet(COMMITTED, tmp_path_factory.mktemp("logs")) as running:
        yield running


def complete(real: RealFleet, **body: Any) -> Any:
    status, reply = real.call("/v1/completions", COMPLETE | body)
    assert status == 200, reply
    return reply


def init_info(world_size: int = 3) -> dict[str, Any]:
    return {
        "init_info": {
            "master_address": "127.0.0.1",
            "master_port": 1,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
        }
    }


def test_a_trainer_finds_what_it_reads_at_the_start(real: RealFleet) -> None:
    assert real.call("/health")[0] == 200
    assert real.call("/v1/models")[1]["data"][0]["id"] == MODEL
    assert real.call("/get_world_size") == (200, {"world_size": 1})
    info = real.call("/server_info?config_format=json")[1]["vllm_config"]
    assert info["weight_transfer_config"]["backend"] == "gloo"
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert real.call("/version")[0] == 200


def test_a_batch_comes_prompt_major_with_ids_and_logprobs(real: RealFleet) -> None:
    reply = complete(real, prompt=PROMPTS, n=3, logprobs=0, return_tokens_as_token_ids=True)
    choices = reply["choices"]
    assert [choice["index"] for choice in choices] == list(range(12))
    assert [choice["prompt_token_ids"] for choice in choices[::3]] == PROMPTS
    for choice in choices:
        logprobs, ids = choice["logprobs"], choice["token_ids"]
        assert logprobs["tokens"] == [f"token_id:{i}" for i in ids]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(ids)
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(ids)}]
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)


def test_greedy_answers_are_the_same_on_every_replica_and_through_the_gateway(real: RealFleet) -> None:
    through = [choice["token_ids"] for choice in complete(real, prompt=PROMPTS, temperature=0)["choices"]]
    for replica in real.replicas:
        assert greedy_token_ids(replica.url, PROMPTS, COMPLETE["max_tokens"]) == through


def test_replicas_do_not_draw_the_same_samples(real: RealFleet) -> None:
    reply = complete(real, prompt=[prompt(5, 6, 7)] * 2, n=8, temperature=2.0, ignore_eos=True, max_tokens=12)
    samples = [tuple(choice["token_ids"]) for choice in reply["choices"]]
    assert len(set(samples)) == len(samples)


def test_prompt_logprobs_score_a_sequence(real: RealFleet) -> None:
    reply = complete(real, prompt=PROMPTS, max_tokens=1, prompt_logprobs=2)
    for choice, asked in zip(reply["choices"], PROMPTS, strict=True):
        scored = choice["prompt_logprobs"]
        assert len(scored) == len(asked)
        assert str(asked[1]) in scored[1]


def test_text_prompts_and_tokenisation(real: RealFleet) -> None:
    tokens = real.call("/tokenize", {"model": MODEL, "prompt": "<|user|>312<|assistant|>"})[1]["tokens"]
    assert tokens == PROMPTS[0]
    assert "312" in real.call("/detokenize", {"model": MODEL, "tokens": tokens})[1]["prompt"]
    text = complete(real, prompt="<|user|>312<|assistant|>", temperature=0)["choices"][0]["token_ids"]
    assert text == complete(real, prompt=PROMPTS[0], temperature=0)["choices"][0]["token_ids"]


def test_chat_answers_whole_and_streamed(real: RealFleet) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "312"}], "max_tokens": 8, "temperature": 0}
    status, whole = real.call("/v1/chat/completions", body)
    assert status == 200, whole
    chunks = real.stream("/v1/chat/completions", body)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]


def test_a_stream_has_the_tokens_of_the_whole_reply(real: RealFleet) -> None:
    body = COMPLETE | {"prompt": PROMPTS, "temperature": 0}
    whole = [choice["token_ids"] for choice in complete(real, **body)["choices"]]
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in real.stream("/v1/completions", body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["token_ids"] or []
    assert streamed == whole


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": [PROMPTS[0], [5] * 512]}, 400, "prompt[1] has 512 tokens"),
        ({"prompt": [PROMPTS[0], []]}, 400, "prompt[1] is empty"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": "1" * 600}, 400, "prompt[0]"),
        ({"prompt": PROMPTS, "model": "gpt-9"}, 404, "gpt-9"),
        ({"prompt": PROMPTS, "n": 2, "temperature": 0}, 400, "temperature"),
        ({"prompt": PROMPTS, "top_p": 7}, 400, "top_p"),
        ({"prompt": [[5, 10**6]]}, 400, "prompt[0]"),
        (b"{broken", 400, "no JSON"),
    ],
)
def test_bad_input_is_refused_in_the_dialects_form_and_the_fleet_goes_on(
    real: RealFleet, body: Any, status: int, said: str
) -> None:
    got, reply = real.call("/v1/completions", body if isinstance(body, bytes) else COMPLETE | body)
    assert got == status, reply
    assert set(reply["error"]) >= {"message", "type", "param", "code"}
    assert said in reply["error"]["message"]
    assert len(complete(real, prompt=PROMPTS)["choices"]) == len(PROMPTS)


def test_weight_calls_out_of_order_are_conflicts_that_trl_does_not_replay(real: RealFleet) -> None:
    for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
        status, reply = real.call(path, {"update_info": {"names": [], "dtype_names": [], "shapes": []}})
        assert (status, reply["error"]["type"]) == (409, "WeightUpdateConflict")
    assert real.call("/init_weight_transfer_engine", init_info(world_size=9))[0] == 409
    complete(real, prompt=PROMPTS)


def test_an_engine_killed_in_the_middle_of_a_batch_costs_no_rollout(real: RealFleet) -> None:
    """Last in the file: the fleet has one replica afterwards."""

    with ThreadPoolExecutor(1) as pool:
        with gathered(real, 128):
            asked = pool.submit(complete, real, prompt=PROMPTS * 8, n=4, max_tokens=200, ignore_eos=True)
        with standing_amid(real):
            real.kill(0)
        reply = asked.result()
    assert [len(choice["token_ids"]) for choice in reply["choices"]] == [200] * 128
    assert real.call("/health")[0] == 503
    states = {r["replica_id"]: r["state"] for r in real.call("/status")[1]["replicas"]}
    assert states["engine-1"] == "SERVING"
    assert states.get("engine-0") in (None, "SUSPECT")
