"""vLLM's own models loaded by plan: equal to what their loaders leave, with every kind of name that trainers send."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3MoeConfig

from engines.inside_vllm import in_place as vllm_in_place
from engines.inside_vllm.base_layers import base_layers, loader_of
from engines.inside_vllm.in_place import obstacle
from engines.loading.planned_load import PlannedLoad
from tests.rigs.engines import vllm_model

Tensors = dict[str, torch.Tensor]

LAYERS, EXPERTS = 2, 4
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": 128}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SHAPES = {
    "dense with a tied head": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "square transposed": GPT2Config(n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=128, n_positions=128),
    "experts": Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=24, num_experts=EXPERTS, num_experts_per_tok=2, decoder_sparse_step=1
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with vllm_model.parallel_state():
        yield


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_in_place, "DEVICES", {"cpu"})


def saved(shape: str, folder: Path, seed: int) -> Any:
    """A transformers model with weights drawn from `seed`; its checkpoint is in `folder`."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
    made.save_pretrained(folder)
    return made


def worker(config: Any, model: Any) -> Any:
    return SimpleNamespace(vllm_config=config, device=torch.device("cpu"), get_model=lambda: model)


def with_backend(model: Any, name: str) -> Any:
    """The experts of a model as on a GPU whose kernels have this name."""
    for module in model.modules():
        if hasattr(module, "unquantized_backend"):
            module.unquantized_backend = SimpleNamespace(name=name)
    return model


def content(model: Any) -> Tensors:
    with base_layers(model):
        return {name: one.detach().clone() for name, one in model.named_parameters()}


def check_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def in_memory(made: Any) -> Tensors:
    """The tensors as transformers holds them, which joins the experts of a layer."""
    return {name: one.detach() for name, one in made.named_parameters()}


@pytest.mark.parametrize("names", ["of the checkpoint", "in memory"])
@pytest.mark.parametrize(
    ("shape", "lora"),
    [*((shape, False) for shape in SHAPES), ("dense with a tied head", True), ("experts", True)],  # GPT-2 has no LoRA
)
def test_an_update_by_plan_leaves_what_a_start_with_those_weights_leaves(
    shape: str, lora: bool, names: str, tmp_path: Path
) -> None:
    saved(shape, tmp_path / "first", 1)
    second = saved(shape, tmp_path / "second", 2)
    _, expected = vllm_model.loaded(tmp_path / "second")
    config, model = vllm_model.loaded(tmp_path / "first", lora=lora)
    assert not obstacle(worker(config, with_backend(model, "TRITON")))
    sent = in_memory(second) if names == "in memory" else vllm_model.tensors_of(tmp_path / "second")
    places = [one.data_ptr() for one in model.parameters()]
    asked: list[int] = []

    def loader(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        asked.append(1)
        loader_of(model)(tensors)

    planned = PlannedLoad(model, loader)
    planned.begin()
    planned.plan((name, tensor.shape, tensor.dtype) for name, tensor in sent.items())
    assert len(asked) == 1
    for half in (0, 1):
        planned.load(list(sent.items())[half::2])
    assert len(asked) == 1
    check_same(content(model), content(expected))
    assert [one.data_ptr() for one in model.parameters()] == places


@pytest.mark.parametrize("backend", ["FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "AITER", "CPU"])
def test_experts_whose_kernels_read_rearranged_weights_are_an_obstacle(backend: str, tmp_path: Path) -> None:
    saved("experts", tmp_path, 1)
    config, model = vllm_model.loaded(tmp_path)
    reason = obstacle(worker(config, with_backend(model, backend)))
    assert reason.startswith("model.layers.0.mlp.experts.routed_experts: ")
    assert backend in reason


def test_experts_that_move_between_ranks_and_joined_gates_are_obstacles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("experts", tmp_path, 1)
    config, model = vllm_model.loaded(tmp_path)
    one = worker(config, with_backend(model, "TRITON"))
    runner = model.model.layers[1].mlp.experts
    monkeypatch.setattr(runner, "_fse_fuse_gate", True)
    assert "joined" in obstacle(one)
    monkeypatch.undo()
    monkeypatch.setattr(vllm_in_place, "DEVICES", {"cpu"})
    monkeypatch.setattr(runner.routed_experts.quant_method.moe.moe_parallel_config, "enable_eplb", True)
    assert "enable_eplb" in obstacle(one)


def test_a_lora_engines_layers_stand_behind_their_wrappers_again_after_a_failed_load(tmp_path: Path) -> None:
    saved("experts", tmp_path, 1)
    _, model = vllm_model.loaded(tmp_path, lora=True)
    before = [type(module).__name__ for module in model.modules()]
    with pytest.raises((KeyError, ValueError, AttributeError), match="nobody"):
        loader_of(model)([("model.layers.0.nobody.weight", torch.ones(1))])
    assert [type(module).__name__ for module in model.modules()] == before
    assert any("WithLoRA" in name for name in before)
    experts = model.model.layers[0].mlp.experts.base_layer.routed_experts
    assert experts.lora_base_layer_prefix == "base_layer."
