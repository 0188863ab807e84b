"""Findings about real vLLM: a step's token budget bounds no sequences, and the report of a running engine."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config
from trainer_client import BlockingRolloutClient, WeightSender
from tuning.doctor.finding import Severity
from tuning.doctor.live import look
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

pytestmark = pytest.mark.vllm

BUDGET, SEQUENCES = 64, 16
PROMPT, RESPONSE = 40, 300
UPDATE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    small = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SEQUENCES, "stream_interval": 1}
    config = engine_config(COMMITTED, tmp_path_factory.mktemp("logs")).model_copy(update=small)
    with app({"policy": config}) as running:
        yield running


def test_sequences_far_longer_than_the_token_budget_run_at_the_same_time(real: RealFleet) -> None:
    """The budget of a step holds not one of them. One after the other they would take SEQUENCES x RESPONSE steps."""
    assert PROMPT + RESPONSE > 5 * BUDGET
    body = {
        "model": str(COMMITTED),
        "prompt": [[3 + (i + j) % 8 for j in range(PROMPT)] for i in range(SEQUENCES)],
        "max_tokens": RESPONSE,
        "ignore_eos": True,
    }
    before = steps(real)
    status, reply = real.call("/v1/completions", body)
    assert status == 200
    assert reply["usage"]["completion_tokens"] == SEQUENCES * RESPONSE
    assert steps(real) - before < 2 * RESPONSE


def steps(real: RealFleet) -> float:
    """Steps that the engine has made, by its own count."""
    return sum(one.value for one in look(real.url).samples if one.name == "vllm:iteration_tokens_total_count")


def test_a_running_engine_tells_its_settings_and_what_it_did(real: RealFleet) -> None:
    live = look(real.url)
    engine = live.engine()
    assert engine is not None
    assert engine.on_cpu
    told = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "stream_interval", "logprobs_mode")
    assert [engine.value(lever) for lever in told] == [BUDGET, SEQUENCES, 512, 1, "processed_logprobs"]
    assert engine.value("enable_chunked_prefill") is True
    found = {one.rule: one for one in examine(subject_of(live=live))}
    assert list(live.kv_tokens().values()) > [0]
    assert found["max-num-batched-tokens"].place == f"{real.url}/server_info"
    assert live.by_replica("waiting").keys() == live.by_replica("preemptions").keys() == set(live.serving)


def test_an_update_under_load_tells_what_it_cost_and_cut_completions_are_told(real: RealFleet) -> None:
    """Completions that may not end by themselves all reach their length."""
    body = {"model": str(COMMITTED), "prompt": [[3, 4, 5, 6]] * 4, "max_tokens": 24, "ignore_eos": True}
    is_over = threading.Event()

    def ask() -> int:
        answered = 0
        while not is_over.is_set():
            status, reply = real.call("/v1/completions", body)
            assert status == 200, reply
            answered += len(reply["choices"])
        return answered

    with ThreadPoolExecutor(4) as callers, BlockingRolloutClient(real.url) as client:
        callers_done = [callers.submit(ask) for _ in range(4)]
        try:
            client.wait_ready(UPDATE_TIMEOUT_S)
            with WeightSender(client, transport="store", timeout_s=UPDATE_TIMEOUT_S) as sender:
                assert sender.push(AutoModelForCausalLM.from_pretrained(COMMITTED, dtype=torch.float32), 1) == 1
        finally:
            is_over.set()
    assert sum(done.result() for done in callers_done) > 0

    live = look(real.url)
    found = {one.rule: one for one in examine(subject_of(live=live))}
    steps = live.status["last_weight_update"]["seconds"]
    assert live.seconds_of_update_steps() == steps
    assert found["live-clipped"].severity is Severity.HURTS
    assert found["live-clipped"].value > 0.9
