"""Errors that are known before an engine starts, and values that are left to the engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.process.preflight import misfits

QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28, "max_position_embeddings": 32768}
Check = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Field and message of each misfit of an engine with a checkpoint: `check({"num_...": 28}, max_model_len=8)`."""

    def found(model: dict[str, Any] | None, /, **levers: Any) -> list[tuple[str, str]]:
        (tmp_path / "model.safetensors").touch()
        if model is not None:
            (tmp_path / "config.json").write_text(json.dumps(model))
        config = EngineConfig.model_validate({"model": str(tmp_path), **levers})
        return [(misfit.field, misfit.message) for misfit in misfits(config)]

    return found


YARN = {"factor": 4.0, "rope_type": "yarn"}
HEADS = "the model has 28 attention heads and 4 KV heads; it can be 1, 2, 4 or 28"


@pytest.mark.parametrize(
    ("model", "levers", "field", "said"),
    [
        (QWEN, {"tensor_parallel_size": 3}, "tensor_parallel_size", HEADS),
        (
            QWEN,
            {"tensor_parallel_size": 7},
            "tensor_parallel_size",
            HEADS,
        ),  # it divides the heads, but not the KV heads
        (QWEN, {"tensor_parallel_size": 8}, "tensor_parallel_size", HEADS),
        ({"text_config": QWEN}, {"tensor_parallel_size": 3}, "tensor_parallel_size", HEADS),  # a multimodal model
        (QWEN, {"pipeline_parallel_size": 29}, "pipeline_parallel_size", ""),
        (QWEN, {"max_model_len": 40000}, "max_model_len", "32768 tokens"),
        (QWEN, {"max_num_batched_tokens": 64, "max_num_seqs": 128}, "max_num_batched_tokens", "max_num_seqs = 128"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_before_its_start(
    check: Check, model: dict[str, Any], levers: dict[str, Any], field: str, said: str
) -> None:
    ((found, message),) = check(model, **levers)
    assert found == field
    assert said in message


@pytest.mark.parametrize(
    ("model", "levers"),
    [
        *((QWEN, {"tensor_parallel_size": gpus}) for gpus in (1, 2, 4, 28)),
        ({"num_attention_heads": 128, "num_key_value_heads": 3, "kv_lora_rank": 512}, {"tensor_parallel_size": 8}),
        (QWEN, {"dtype": "half"}),
        (QWEN, {"kind": "sglang", "max_num_batched_tokens": 64, "max_num_seqs": 128}),
        (QWEN | {"rope_scaling": YARN}, {"max_model_len": 40000}),
        (QWEN | {"rope_parameters": YARN}, {"max_model_len": 40000}),
        (QWEN | {"model_max_length": 65536}, {"max_model_len": 40000}),
        (QWEN, {"max_model_len": 40000, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}),
        (QWEN, {"max_model_len": 40000, "extra": {"hf_overrides": {"max_position_embeddings": 65536}}}),
        ({}, {"max_model_len": 40000}),
    ],
)
def test_what_fits_and_what_the_engine_alone_knows_is_taken(
    check: Check, model: dict[str, Any], levers: dict[str, Any]
) -> None:
    assert check(model, **levers) == []


def test_a_checkpoint_quantised_otherwise_is_refused(check: Check) -> None:
    gptq = QWEN | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    ((field, message),) = check(gptq, quantization="awq")
    assert (field, "quantised with gptq" in message) == ("quantization", True)
    assert check(gptq, quantization="gptq_marlin") == []


def test_sglang_that_quantises_a_plain_checkpoint_takes_no_updates(check: Check) -> None:
    """SGLang 0.5.17 on a GPU ends with the first load from disk: its fp8 weights are kept transposed."""
    ((field, message),) = check(QWEN, kind="sglang", quantization="fp8")
    assert (field, "kind = vllm, or frozen = true" in message) == ("quantization", True)
    assert check(QWEN, kind="sglang", quantization="fp8", frozen=True) == []
    assert check(QWEN, kind="vllm", quantization="fp8") == []
    blocks = QWEN | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert check(blocks, kind="sglang", quantization="fp8") == []


def test_a_folder_without_config_or_weights_is_no_checkpoint(check: Check, tmp_path: Path) -> None:
    ((field, message),) = check(None)
    assert (field, "no config.json" in message) == ("model", True)
    (tmp_path / "config.json").write_text("{")
    ((field, message),) = check(None)
    assert (field, "cannot be read" in message) == ("model", True)

    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    ((field, message),) = check(None, model=str(bare))
    assert (field, "has no weights" in message) == ("model", True)
    assert check(None, model=str(bare), load_format="dummy") == []


def test_what_is_not_here_is_left_to_the_engine(check: Check) -> None:
    assert check(None, model="Qwen/Qwen2-7B-Instruct", tensor_parallel_size=3) == []
    assert check(QWEN, kind="sim", tensor_parallel_size=3) == []
