"""Mends of vLLM's CPU build: experts packed after a reload as at a start, and rows without an adapter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engines.inside_vllm import cpu_mends
from tests.rigs.engines import vllm_model

CONFIG = Qwen3MoeConfig(
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=1,
    vocab_size=128,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with vllm_model.parallel_state():
        yield


@pytest.fixture
def _mended() -> None:
    """As in a worker; a process keeps it, and a second call must not pack twice."""
    cpu_mends.mend_experts()
    cpu_mends.mend_experts()


def saved(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def started(folder: Path) -> tuple[Any, Any]:
    """As an engine on a CPU has it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    config, model = vllm_model.loaded(folder)
    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return config, model


def reload(config: Any, model: Any, folder: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(config), torch.device("cpu"):
        initialize_layerwise_reload(model)
        model.load_weights(vllm_model.tensors_of(folder).items())
        finalize_layerwise_reload(model, config.model_config)


def experts(model: Any) -> list[torch.Tensor]:
    held = model.model.layers[0].mlp.experts.routed_experts
    return [held.w13_weight, held.w2_weight]


@pytest.mark.usefixtures("_mended")
def test_a_reload_packs_experts_as_a_start_does(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "first", 1), saved(tmp_path / "second", 2)
    config, model = started(first)
    places = [one.data_ptr() for one in experts(model)]
    _, expected = started(second)
    reload(config, model, second)
    assert all(torch.equal(one, other) for one, other in zip(experts(model), experts(expected), strict=True))
    assert [one.data_ptr() for one in experts(model)] == places


def test_a_row_without_an_adapter_gets_none_though_the_last_place_is_taken() -> None:
    lora_ops = pytest.importorskip("vllm.lora.ops.torch_ops.lora_ops")
    cpu_mends.mend_adapters()
    cpu_mends.mend_adapters()  # once is enough
    rows, adapters = torch.ones(4, 8), torch.tensor([-1, 0, 2, -1])
    shrunk = torch.full((4, 2), 7.0)
    lora_ops.bgmv_shrink(rows, torch.ones(3, 1, 2, 8), shrunk, adapters, 0.5)
    assert shrunk.tolist() == [[0, 0], [4, 4], [4, 4], [0, 0]]
    added = torch.zeros(4, 5)
    lora_ops.bgmv_expand(shrunk, torch.ones(3, 1, 5, 2), added, adapters)
    assert added[:, 0].tolist() == [0, 8, 8, 0]
