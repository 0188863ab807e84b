"""Sizes of models, against counts that are known: published ones, and those of a checkpoint's own header."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.folder import read_tensors
from engines.errors import ConfigError
from loadtests.shapes import SHAPES
from tests.material.hub_cache import cached
from tests.tuning.plan.published import MODELS
from tuning.plan.shape import read_shape, shape_of

TINY = Path(__file__).parents[3] / "examples" / "tiny_model" / "digit-sort"

LLAMA_8B = MODELS["Llama-3.1-70B"].config | {"num_hidden_layers": 32, "hidden_size": 4096} | {
    "num_attention_heads": 32, "intermediate_size": 14336,
}  # fmt: skip
MIXTURE = MODELS["Qwen3-30B-A3B"]


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (SHAPES["qwen2-7b"], 7_615_616_512),
        (SHAPES["qwen2-0.5b"], 494_032_768),
        (LLAMA_8B, 8_030_261_248),
        (MIXTURE.config, 30_532_122_624),
        (MODELS["DeepSeek-V3"].config, 671_026_419_200),
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


def test_a_mixture_multiplies_with_chosen_experts_and_reads_experts_of_any_token() -> None:
    shape = MIXTURE.shape("model")
    assert shape.active_parameters == pytest.approx(3.0e9, rel=0.05)
    assert shape.read_bytes(1) == pytest.approx(2 * shape.active_parameters)
    assert shape.read_bytes(1000) == pytest.approx(2 * (shape.parameters - shape.embedding_parameters))


def test_kv_cache_of_grouped_heads_is_cut_among_gpus_until_a_gpu_has_one() -> None:
    shape = shape_of(LLAMA_8B, "model")
    assert shape.kv_bytes(1) == 2 * 2 * 32 * 8 * 128
    assert shape.kv_bytes(2) == shape.kv_bytes(1) / 2
    assert shape.kv_bytes(16) == shape.kv_bytes(8)


def test_kv_cache_of_a_latent_is_held_whole_by_every_gpu() -> None:
    shape = MODELS["DeepSeek-V3"].shape("model")
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


def test_layers_with_a_window_hold_no_more_than_it() -> None:
    shape = MODELS["gemma-3-27b"].shape("model")
    whole = 62 * 2 * 16 * 128 * 2
    assert shape.kv_bytes(1) == shape.kv_bytes(1, 1024) == whole
    assert shape.kv_bytes(1, 32768) == pytest.approx(whole * (10 + 52 / 32) / 62)
    unused = shape_of(LLAMA_8B | {"sliding_window": 131072, "use_sliding_window": False}, "model")
    assert unused.kv_bytes(1, 1 << 20) == unused.kv_bytes(1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": "x"}, "num_key_value_heads = 'x' is no whole number from 1"),
        ({"head_dim": 0}, "head_dim = 0 is no whole number"),
        ({"hidden_size": 7}, "hidden_size = 7 is less than num_attention_heads = 32"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True is no whole number"),
        ({"vocab_size": 10**18}, "vocab_size = 1000000000000000000 is no whole number"),
        ({"num_experts": float("nan")}, "num_experts = nan is no whole number from 0"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok = 8, and there are 4 experts"),
        ({"num_experts": 4, "first_k_dense_replace": 99}, "99 of 32 layers without experts"),
        ({"layer_types": 1}, "layer_types = 1 is no list"),
        ({"max_position_embeddings": {}}, "max_position_embeddings = {} is no whole number"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of linear_attention keep no KV cache that"),
        ({"linear_num_key_heads": 16, "full_attention_interval": 4}, "cannot size this"),  # Qwen3-Next
        *(
            ({"quantization_config": odd}, "cannot size this: quantization_config")
            for odd in (
                {"bits": "x"}, {"config_groups": True}, {"config_groups": {"a": 1}}, {"weight_block_size": "x"}, [1],
                {"config_groups": {"a": {"weights": {"num_bits": "x"}}}},
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_sized_is_refused_with_its_key(changes: dict[str, Any], says: str) -> None:
    quantization = changes.get("quantization_config", {})
    with pytest.raises(ConfigError, match=re.escape(says)):
        shape_of(LLAMA_8B | changes, "model", quantization=quantization)


def test_blocks_of_quantized_weights_bound_the_tensor_parallel_size() -> None:
    """Qwen3-30B-A3B-FP8: experts of 768 are six blocks of 128."""
    shape = shape_of(MIXTURE.config, "model", quantization=MODELS["DeepSeek-V3"].quantization)
    assert [size for size in (1, 2, 4, 8) if shape.splits_into(size)] == [1, 2]
    assert MIXTURE.shape("model").splits_into(8)
