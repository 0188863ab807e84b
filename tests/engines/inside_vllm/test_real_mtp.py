"""vLLM's own MTP layers (GLM-4 MoE) get their tensors out of an update of the whole checkpoint, by plans."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from engines.loading.draft import Draft
from tests.rigs.engines import vllm_model

Tensors = dict[str, torch.Tensor]

HIDDEN = 32
CONFIG = Glm4MoeConfig(
    vocab_size=64, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=1,
    num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, max_position_embeddings=64,
    num_nextn_predict_layers=1, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with vllm_model.parallel_state():
        yield


def of_mtp_layer(trained: Tensors) -> Tensors:
    """The tensors of the layer behind the last: a decoder layer, and those that join it to the model."""
    last = "model.layers.1."
    found = {name.replace(last, "model.layers.2."): tensor * 2 for name, tensor in trained.items() if last in name}
    norms = {name: torch.full((HIDDEN,), 3.0, dtype=torch.bfloat16) for name in ("enorm", "hnorm", "shared_head.norm")}
    others = {
        **norms,
        "eh_proj": torch.full((HIDDEN, 2 * HIDDEN), 4.0, dtype=torch.bfloat16),
        "shared_head.head": trained["lm_head.weight"],  # the loader puts both there
        "embed_tokens": trained["model.embed_tokens.weight"],
    }
    return found | {f"model.layers.2.{name}.weight": tensor for name, tensor in others.items()}


def content(model: Any) -> Tensors:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def test_mtp_layers_follow_an_update_of_the_whole_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(tmp_path)
    trained = vllm_model.tensors_of(tmp_path)
    sent = trained | of_mtp_layer(trained)
    expected_target, expected = vllm_model.with_mtp_layers(tmp_path)
    expected_target.load_weights(sent.items())
    expected.load_weights(sent.items())

    target, layers = vllm_model.with_mtp_layers(tmp_path)
    for parameter in layers.parameters():
        parameter.data.fill_(7)
    draft = Draft("mtp", layers, target)
    assert draft.describe() == "mtp, updated where the trainer sends its tensors"
    draft.begin()
    load = draft.beside(target.load_weights)
    load(trained.items())
    assert torch.equal(layers.model.embed_tokens.weight, expected.model.embed_tokens.weight)

    draft.begin()
    for half in (0, 1):
        load(list(sent.items())[half::2])
    found, wanted = content(layers), content(expected)
    assert found.keys() == wanted.keys()
    assert not [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
