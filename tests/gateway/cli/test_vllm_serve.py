"""The options of `trl vllm-serve` as our configuration."""

import dataclasses
import re
from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.cli.vllm_serve import KEYS, read_options

MODEL = ["--model", "Qwen/Qwen3-0.6B"]
ROOT = Path(__file__).parents[3]
TINY = "examples/tiny_model/digit-sort"


def test_what_trl_asks_for_is_what_our_keys_say() -> None:
    words = [
        *["--model", "Qwen/Qwen3-0.6B", "--revision", "main", "--tensor_parallel_size", "2", "--data-parallel-size=1"],
        *["--port", "8123", "--gpu_memory_utilization", "0.85", "--dtype", "bfloat16", "--max_model_len", "4096"],
        *["--enable_prefix_caching", "False", "--enforce_eager", "--kv_cache_dtype", "fp8", "--trust_remote_code"],
        *["--log_level", "error", "--vllm_model_impl", "transformers", "--distributed_executor_backend", "mp"],
        *["--speculative_config", '{"method": "ngram", "num_speculative_tokens": 5}', "--replicas", "4"],
    ]
    config = read_options(words, {})
    engine = config.engine
    assert config.gateway.port == 8123
    assert (engine.model, engine.num_replicas, engine.tensor_parallel_size) == ("Qwen/Qwen3-0.6B", 4, 2)
    assert (engine.gpu_memory_utilization, engine.dtype, engine.max_model_len) == (0.85, "bfloat16", 4096)
    assert (engine.enable_prefix_caching, engine.enforce_eager, engine.kv_cache_dtype) == (False, True, "fp8")
    assert engine.speculative_config == {"method": "ngram", "num_speculative_tokens": 5}
    assert engine.extra == {
        "revision": "main",
        "trust_remote_code": True,
        "uvicorn_log_level": "error",
        "model_impl": "transformers",
        "distributed_executor_backend": "mp",
    }


def test_the_options_are_those_of_the_installed_trl() -> None:
    script = pytest.importorskip("trl.scripts.vllm_serve")
    of_vllm = {"revision", "trust_remote_code", "distributed_executor_backend"}
    assert {one.name for one in dataclasses.fields(script.ScriptArguments)} - KEYS.keys() == of_vllm


def test_the_url_is_where_trainers_look_and_the_control_plane_beside_it() -> None:
    config = read_options(MODEL, {})
    assert (config.gateway.host, config.gateway.port, config.serve.http_port) == ("127.0.0.1", 8000, 8001)
    assert read_options([*MODEL, "--port", "9000"], {}).serve.http_port == 8000
    assert read_options(MODEL, {"ROLLOUT_GATEWAY_GATEWAY__PORT": "9001"}).gateway.port == 9001


def test_the_model_is_served_by_the_name_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    engine = read_options(["--model", TINY], {}).engine
    assert (engine.model, engine.served_name) == (str(ROOT / TINY), TINY)
    named = read_options(["--model", TINY, "--served-model-name", "policy"], {}).engine
    assert named.served_name == "policy"


def test_options_of_vllm_and_keys_of_ours_are_taken_too() -> None:
    words = [*MODEL, "--max-num-seqs", "64", "--enable-lora", "--max-loras", "6", "--tokenizer-mode", "slow"]
    words += ["--no-async-scheduling", "--gateway.max_attempts", "4", "engine.num_cpus=2", "--max-logprobs", "-1"]
    asked = read_options(words, {})
    assert (asked.engine.max_num_seqs, asked.engine.enable_lora, asked.engine.max_loras) == (64, True, 6)
    assert asked.engine.extra == {"tokenizer_mode": "slow", "async_scheduling": False}
    assert (asked.gateway.max_attempts, asked.engine.num_cpus, asked.engine.max_logprobs) == (4, 2, -1)


@pytest.mark.parametrize(
    "option",
    ["model", "port", "max-model-len", "replicas", "gpu-memory-utilization", "gateway.port",
     "gateway.generate_timeout_s", "no-port", "dtype"],
)  # fmt: skip
def test_an_option_that_needs_a_value_is_refused_without_one(option: str) -> None:
    name = option.removeprefix("no-")
    with pytest.raises(ConfigError, match=re.sub("[-_]", "[-_]", f"--{name}")):
        read_options([*MODEL, f"--{option}", "--enforce-eager"], {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--model is missing"),
        (["Qwen/Qwen3-0.6B"], "'Qwen/Qwen3-0.6B' is no option"),
        ([*MODEL, "-tp", "2"], "'-tp' is no option: write each in full"),
        ([*MODEL, "--max_model_len", "abc"], r"argument --max_model_len: engine.max_model_len = 'abc'"),
        ([*MODEL, "--replicas", "0"], r"argument --replicas: engine.num_replicas = 0"),
        ([*MODEL, "--distributed_executor_backend", "ray"], "a replica's GPUs are on one node"),
        ([*MODEL, "--host", "0.0.0.0"], "set gateway.inference_keys and gateway.admin_keys"),
        ([*MODEL, "--gateway.prot", "1"], r"gateway.prot: unknown key; did you mean gateway.port"),
    ],
)
def test_a_mistake_is_named_by_the_option_that_made_it(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_options(words, {})
