"""Tensors of transformers' modules become what save_pretrained writes; tied ones are one tensor under any name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file

from engines.checkpoint import folder
from engines.checkpoint.folder import tied_names, ties_embeddings
from engines.checkpoint.names import CheckpointNames, Incoming, announced_as
from engines.errors import InvalidRequest

TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {
    **TEXT, "moe_intermediate_size": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
HYBRID = {
    **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
QWEN_TEXT = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
LLAVA = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "bloom"), TEXT),
    **dict.fromkeys(("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "deepseek_v3", "glm4_moe"), EXPERTS),
    **dict.fromkeys(("gpt_oss", "llama4_text"), EXPERTS),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), HYBRID),
    "qwen2_vl": {"text_config": QWEN_TEXT, "vision_config": {**QWEN_VISION, "embed_dim": 16, "mlp_ratio": 2}},
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT, "vision_config": {**QWEN_VISION, "out_hidden_size": 16, "intermediate_size": 16}
    },
    "qwen3_5_moe": {
        "text_config": HYBRID, "vision_config": {**QWEN_VISION, "out_hidden_size": 16, "intermediate_size": 16}
    },
    "gemma3": {
        "text_config": TEXT, "vision_config": {**VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4
    },
    "llava": LLAVA,
    "llava_next": LLAVA,
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
    },
    "paligemma": {
        "text_config": {**TEXT, "model_type": "gemma"}, "projection_dim": 16,
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "projection_dim": 16},
    },
}  # fmt: skip


def made(kind: str, *, tied: bool) -> Any:
    config = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(MODELS[kind])))
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    sees = "text_config" in MODELS[kind]
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return auto.from_config(config)


def saved(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def rule(stored: Any, folder: Path, *tied: tuple[str, str]) -> CheckpointNames:
    return CheckpointNames(stored, (folder / "config.json").read_text(), tied)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_modules_tensors_become_what_save_pretrained_writes(kind: str, tied: bool, tmp_path: Path) -> None:
    model = made(kind, tied=tied)
    stored = saved(model, tmp_path)
    given = list(model.state_dict().items())
    received = Incoming(rule(stored, tmp_path)).converted(given)
    assert sorted(name for name, _ in received) == sorted(stored)
    assert all(tensor.shape == stored[name].shape and torch.equal(tensor, stored[name]) for name, tensor in received)
    announced = {
        "names": [name for name, _ in given],
        "shapes": [list(tensor.shape) for _, tensor in given],
        "dtype_names": ["float32"] * len(given),
    }
    answered = announced_as(rule(stored, tmp_path), announced)
    assert list(zip(answered["names"], answered["shapes"], strict=True)) == [
        (name, list(tensor.shape)) for name, tensor in received
    ]


def test_a_tied_head_may_come_beside_its_embedding_with_the_same_values_only(tmp_path: Path) -> None:
    model = made("qwen3", tied=True)
    names, embed = rule(saved(model, tmp_path), tmp_path), torch.rand(64, 16)
    both = [("model.embed_tokens.weight", embed), ("lm_head.weight", embed.clone())]
    assert [name for name, _ in Incoming(names).converted(both)] == ["model.embed_tokens.weight"]
    with pytest.raises(InvalidRequest, match=r"'model\.embed_tokens\.weight' and 'lm_head\.weight'"):
        Incoming(names).converted([both[0], ("lm_head.weight", embed + 1)])


@pytest.mark.parametrize("pushed", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tensor_that_is_stored_twice_is_replaced_under_both_names(pushed: str, tmp_path: Path) -> None:
    model = made("qwen3", tied=True)
    stored = saved(model, tmp_path)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    names = rule(stored, tmp_path, ("lm_head.weight", "model.embed_tokens.weight"))
    received = Incoming(names).converted([(pushed, torch.ones(64, 16))])
    assert sorted(name for name, _ in received) == ["lm_head.weight", "model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("said", "differs_at", "is_tied"),
    [
        ({"tie_word_embeddings": True}, None, True),
        ({"model_type": "gemma"}, None, True),
        ({"tie_word_embeddings": True}, (0, 0), False),
        ({"tie_word_embeddings": True}, (-1, -1), False),
        ({"tie_word_embeddings": False}, None, False),
        ({"model_type": "mistral3"}, (0, 0), False),
    ],
)
def test_a_stored_head_is_tied_where_its_bytes_are_the_embeddings(
    said: dict[str, Any], differs_at: Any, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr(folder, "_PIECE_BYTES", 64)
    if differs_at == (0, 0):  # what transformers says is not asked: its import takes seconds
        monkeypatch.setattr(folder, "ties_embeddings", None)
    embed = torch.rand(64, 16)
    head = embed.clone()
    if differs_at:
        head[differs_at] += 1
    save_file({"model.embed_tokens.weight": embed, "lm_head.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, **said}))
    assert tied_names(tmp_path) == ((("lm_head.weight", "model.embed_tokens.weight"),) if is_tied else ())


@pytest.mark.parametrize(
    ("config", "ties"),
    [
        *(({"model_type": kind}, True) for kind in ("gemma", "gemma2", "gemma3_text", "gemma3", "gpt2", "paligemma")),
        *(({"model_type": kind}, False) for kind in ("llama", "qwen3", "qwen3_moe", "qwen2_vl")),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, False),
        ({"model_type": "qwen2_vl", "tie_word_embeddings": True, "text_config": {}}, True),
        ({"model_type": "of_other_code", "text_config": {"tie_word_embeddings": True}}, True),
        ({}, False),
    ],
)
def test_a_configuration_without_a_word_on_ties_has_its_classes_default(config: dict[str, Any], ties: bool) -> None:
    assert ties_embeddings(json.dumps(config)) == ties


@pytest.mark.parametrize(("kind", "prefix"), [("gpt2", "transformer."), ("bloom", "transformer.")])
def test_a_checkpoint_may_lack_the_prefix_of_its_base_model(kind: str, prefix: str, tmp_path: Path) -> None:
    """As openai-community/gpt2 and bigscience/bloom-560m do."""
    model = made(kind, tied=True)
    stored = {name.removeprefix(prefix): one for name, one in saved(model, tmp_path).items()}
    received = Incoming(rule(stored, tmp_path)).converted(model.state_dict().items())
    assert sorted(name for name, _ in received) == sorted(stored)


def test_a_checkpoint_with_code_of_its_own_is_trained_by_transformers_class_too(tmp_path: Path) -> None:
    """As DeepSeek-V2-Lite and Moonlight are without `trust_remote_code`."""
    model = made("deepseek_v3", tied=False)
    stored = saved(model, tmp_path)
    own_code = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": {"AutoConfig": "configuration.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(own_code))
    received = Incoming(rule(stored, tmp_path)).converted(model.state_dict().items())
    assert sorted(name for name, _ in received) == sorted(stored)


def test_a_name_that_no_rule_explains_is_refused_with_the_nearest(tmp_path: Path) -> None:
    names = rule(saved(made("qwen3", tied=True), tmp_path), tmp_path)
    with pytest.raises(InvalidRequest, match=r"0\.extra\.weight', which .* nearest name is 'model\.layers"):
        names.converted("model.layers.0.extra.weight", torch.ones(1))


def test_names_of_a_model_without_an_architecture_load_no_transformers() -> None:
    """Its import takes seconds, in which the relay and a trainer of another library's modules stand still."""
    code = (
        "import sys, torch\n"
        "from engines.checkpoint.names import CheckpointNames\n"
        "for names in (CheckpointNames(), CheckpointNames(['w'])):\n"
        "    names.converted('w', torch.ones(1)), names.are_tied('w')\n"
        "print('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
