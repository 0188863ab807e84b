"""Sizes of models, against counts that are known: published ones, and those of a checkpoint's own header."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint import read_tensors
from engines.errors import ConfigError
from gateway.tuning.plan.shape import read_shape, shape_of
from loadtests.shapes import SHAPES
from tests.material.hub_cache import cached

TINY = Path(__file__).parents[4] / "examples" / "tiny_model" / "digit-sort"

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (SHAPES["qwen2-7b"], 7_615_616_512),
        (SHAPES["qwen2-0.5b"], 494_032_768),
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_30B_A3B, 30_532_122_624),
        (DEEPSEEK_V3, 671_026_419_200),
    ],
)
def test_parameters_are_those_of_the_published_model(config: dict[str, Any], parameters: int) -> None:
    assert shape_of(config, "model").parameters == pytest.approx(parameters, rel=0.001)


def test_parameters_of_a_folder_are_those_in_its_files() -> None:
    tensors = read_tensors(TINY)
    assert tensors is not None
    assert read_shape(TINY).parameters == pytest.approx(sum(math.prod(tensor.shape) for tensor in tensors), rel=0.001)


def test_an_id_is_read_from_the_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached(TINY, tmp_path, "acme/tiny")
    shape = read_shape(Path("acme/tiny"))
    assert (shape.name, shape.parameters) == ("tiny", read_shape(TINY).parameters)


def test_a_mixture_multiplies_with_the_experts_taken_and_reads_those_that_any_token_takes() -> None:
    shape = shape_of(QWEN3_30B_A3B, "model")
    assert shape.active_parameters == pytest.approx(3.0e9, rel=0.05)
    assert shape.read_bytes(1) == pytest.approx(2 * shape.active_parameters)
    assert shape.read_bytes(1000) == pytest.approx(2 * (shape.parameters - shape.embedding_parameters))


def test_kv_cache_of_grouped_heads_is_cut_among_gpus_until_a_gpu_has_one() -> None:
    shape = shape_of(LLAMA_8B, "model")
    assert shape.kv_bytes(1) == 2 * 2 * 32 * 8 * 128
    assert shape.kv_bytes(2) == shape.kv_bytes(1) / 2
    assert shape.kv_bytes(16) == shape.kv_bytes(8)


def test_kv_cache_of_a_latent_is_held_whole_by_every_gpu() -> None:
    shape = shape_of(DEEPSEEK_V3, "model")
    assert shape.kv_bytes(1) == shape.kv_bytes(8) == 61 * (512 + 64) * 2


def test_numbers_stand_for_a_folder_and_go_over_it() -> None:
    numbers = [f"{key}={json.dumps(value)}" for key, value in LLAMA_8B.items()]
    assert read_shape(None, numbers).parameters == shape_of(LLAMA_8B, "model").parameters
    assert read_shape(TINY, ["num_hidden_layers=1"]).layers == 1


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hidden_size is missing; give it with --shape hidden_size=NUMBER"):
        read_shape(None, ["num_hidden_layers=4"])
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        read_shape(tmp_path)
    with pytest.raises(ConfigError, match=r"'four': expected KEY=VALUE"):
        read_shape(None, ["four"])


def test_layers_without_a_known_kv_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers of linear_attention keep no KV cache that is known here"):
        shape_of({**LLAMA_8B, "layer_types": ["linear_attention", "full_attention"]}, "model")
