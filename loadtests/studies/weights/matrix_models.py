"""Tiny checkpoints of the architectures of `model_matrix`, with random weights and the demo's tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.tiny_model.task import COMMITTED

Json = dict[str, Any]

_TEXT: Json = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: Json = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_shared_experts": 1, "shared_intermediate_size": 128, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 0, "decoder_sparse_step": 1,
}  # fmt: skip
"""The same sizes by every family's names; a configuration takes the names that it has."""
_MLA: Json = {
    "kv_lora_rank": 512, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
_LINEAR: Json = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA: Json = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_d_ssm": 256,
}  # fmt: skip
_CONV: Json = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
_GPT: Json = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}

_PATCHES: Json = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128, "patch_size": 16,
}  # fmt: skip
_TOWER: Json = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
_IMAGE: Json = {"image_token_id": 67, "video_token_id": 68, "vision_start_token_id": 69, "vision_end_token_id": 70}
_INDEX: Json = {"image_token_index": 67}
_MROPE: Json = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_HALF_MROPE: Json = _MROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an architecture is made tiny. `kind` is the model type of transformers."""

    family: str
    kind: str
    sizes: Json = field(default_factory=dict)
    vision: Json = field(default_factory=dict)
    """Sizes of the vision tower, for a model that has one."""
    outer: Json = field(default_factory=dict)
    """Fields of a vision model's configuration that belong to neither part."""
    text_kind: str = ""
    """Model type of a vision model's text part, where the configuration takes several."""
    tied: bool = False
    head_twice: bool = False
    """The checkpoint stores the tied head a second time."""
    bfloat16: bool = False
    """The engine computes this architecture in bfloat16 alone on the CPU."""

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.bfloat16 else "float32"


def _dense(kind: str, **more: Any) -> Shape:
    return _shape("dense", kind, more)


def _moe(kind: str, **more: Any) -> Shape:
    return _shape("experts", kind, _EXPERTS | more)


def _hybrid(kind: str, **more: Any) -> Shape:
    return _shape("hybrid", kind, more)


def _vision(kind: str, vision: Json, outer: Json, text_kind: str = "", **more: Any) -> Shape:
    return _shape("vision", kind, more, vision=vision, outer=outer, text_kind=text_kind)


def _shape(family: str, kind: str, given: Json, **parts: Any) -> Shape:
    flags = {name: given.pop(name) for name in ("tied", "head_twice", "bfloat16") if name in given}
    return Shape(family=family, kind=kind, sizes=given, **parts, **flags)


SHAPES: Mapping[str, Shape] = {
    "llama": _dense("llama"),
    "llama, tied": _dense("llama", tied=True),
    "llama, head twice": _dense("llama", tied=True, head_twice=True),
    "qwen2": _dense("qwen2"),
    "qwen2, head twice": _dense("qwen2", tied=True, head_twice=True),
    "qwen3": _dense("qwen3"),
    "qwen3, head twice": _dense("qwen3", tied=True, head_twice=True),
    "mistral": _dense("mistral"),
    "ministral3": _dense("ministral3"),
    "gemma": _dense("gemma", tied=True),
    "gemma2": _dense("gemma2", tied=True, query_pre_attn_scalar=32),
    "gemma3_text": _dense("gemma3_text", tied=True, query_pre_attn_scalar=32),
    "phi3": _dense("phi3"),
    "granite, tied": _dense("granite", tied=True),
    "cohere": _dense("cohere", tied=True),
    "cohere2": _dense("cohere2", tied=True),
    "stablelm": _dense("stablelm"),
    "nemotron": _dense("nemotron"),
    "falcon": _dense("falcon", tied=True, num_kv_heads=2, new_decoder_architecture=True),
    "bloom": _dense("bloom", tied=True, n_layer=2, n_head=4),
    "gpt2": _dense("gpt2", tied=True, **_GPT),
    "gptj": _dense("gptj", rotary_dim=16, **_GPT),
    "opt": _dense("opt", tied=True, ffn_dim=256, word_embed_proj_dim=128),
    "glm4": _dense("glm4"),
    "exaone4": _dense("exaone4"),
    "ernie4_5, tied": _dense("ernie4_5", tied=True),
    "apertus": _dense("apertus"),
    "hyperclovax": _dense("hyperclovax"),
    "olmo2": _dense("olmo2"),
    "olmo3": _dense("olmo3"),
    "smollm3": _dense("smollm3"),
    "seed_oss": _dense("seed_oss"),
    "qwen2_moe": _moe("qwen2_moe"),
    "qwen3_moe": _moe("qwen3_moe"),
    "qwen3_moe, head twice": _moe("qwen3_moe", tied=True, head_twice=True),
    "mixtral": _moe("mixtral"),
    "olmoe": _moe("olmoe"),
    "granitemoe, tied": _moe("granitemoe", tied=True),
    "granitemoeshared, tied": _moe("granitemoeshared", tied=True),
    "deepseek_v3": _moe("deepseek_v3", topk_method="noaux_tc", **_MLA),
    "glm4_moe": _moe("glm4_moe"),
    "ernie4_5_moe": _moe("ernie4_5_moe"),
    "phimoe": _moe("phimoe"),
    "gpt_oss": _moe("gpt_oss"),
    "minimax_m2": _moe("minimax_m2"),
    "exaone_moe": _moe("exaone_moe"),
    "qwen3_next": _moe("qwen3_next", bfloat16=True, **_LINEAR),
    "qwen3_5_text": _hybrid("qwen3_5_text", bfloat16=True, **_LINEAR),
    "olmo_hybrid": _hybrid("olmo_hybrid", bfloat16=True, **_LINEAR),
    "mamba, tied": _hybrid("mamba", state_size=16, tied=True),
    "mamba2, tied": _hybrid("mamba2", num_heads=8, state_size=16, n_groups=1, chunk_size=16, tied=True),
    "falcon_mamba": _hybrid("falcon_mamba", state_size=16),
    "falcon_h1": _hybrid("falcon_h1", **_MAMBA),
    "granitemoehybrid, tied": _shape(
        "hybrid", "granitemoehybrid", _EXPERTS | _MAMBA | {"layer_types": ["mamba", "attention"], "tied": True}
    ),
    "lfm2, tied": _hybrid("lfm2", tied=True, conv_dim=128, **_CONV),
    "lfm2_moe": _shape("hybrid", "lfm2_moe", _EXPERTS | _CONV | {"num_dense_layers": 1}),
    "nemotron_h": _hybrid(
        "nemotron_h", layers_block_type=["mamba", "attention"], mamba_num_heads=8, mamba_head_dim=32, n_groups=1,
        ssm_state_size=16, chunk_size=16,
    ),
    "qwen2_vl": _vision(
        "qwen2_vl", _PATCHES | {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}, _IMAGE, rope_parameters=_MROPE
    ),
    "qwen2_5_vl": _vision("qwen2_5_vl", _PATCHES | {"fullatt_block_indexes": [1]}, _IMAGE, rope_parameters=_MROPE),
    "qwen2_5_vl, tied": _vision(
        "qwen2_5_vl", _PATCHES | {"fullatt_block_indexes": [1]}, _IMAGE, rope_parameters=_MROPE, tied=True
    ),
    "qwen2_5_vl, head twice": _vision(
        "qwen2_5_vl", _PATCHES | {"fullatt_block_indexes": [1]}, _IMAGE, rope_parameters=_MROPE, tied=True,
        head_twice=True,
    ),
    "qwen3_vl": _vision(
        "qwen3_vl", _PATCHES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}, _IMAGE,
        rope_parameters=_MROPE | {"mrope_interleaved": True},
    ),
    "qwen3_vl_moe": _vision(
        "qwen3_vl_moe", _PATCHES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}, _IMAGE,
        rope_parameters=_MROPE | {"mrope_interleaved": True}, **_EXPERTS,
    ),
    "gemma3": _vision(
        "gemma3", _TOWER, _INDEX | {"mm_tokens_per_image": 4, "boi_token_index": 69, "eoi_token_index": 70}, tied=True,
        query_pre_attn_scalar=32,
    ),
    "llava": _vision("llava", _TOWER, _INDEX | {"image_seq_length": 16}, "llama"),
    "llava_next": _vision("llava_next", _TOWER, _INDEX | {"image_grid_pinpoints": [[56, 112], [112, 56]]}, "llama"),
    "mistral3": _vision("mistral3", _TOWER | {"head_dim": 32}, _INDEX, "mistral"),
    "paligemma": _vision("paligemma", _TOWER, _INDEX | {"projection_dim": 128, "hidden_size": 128}, "gemma", tied=True),
    "idefics3": _vision("idefics3", _TOWER, {"image_token_id": 67, "pad_token_id": 0}, "llama"),
    "internvl": _vision(
        "internvl", _TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
        {"image_token_id": 67, "image_seq_length": 4}, "qwen2",
    ),
    "qwen3_5_moe": _vision(
        "qwen3_5_moe", _PATCHES | {"num_position_embeddings": 64}, _IMAGE, bfloat16=True,
        rope_parameters=_HALF_MROPE | {"mrope_interleaved": True}, **_EXPERTS | _LINEAR,
    ),
}  # fmt: skip


def make(shape: Shape, folder: Path) -> None:
    """Write a checkpoint as transformers does, in float32."""
    import torch
    from transformers import AutoTokenizer

    model = _auto(shape).from_config(_config(shape)).float()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2, generator=drawn)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=drawn) * 0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(COMMITTED).save_pretrained(folder)
    if shape.head_twice:
        _store_head_twice(folder / "model.safetensors")


def load_model(shape: Shape, folder: Path) -> Any:
    """Return the checkpoint's model as a trainer holds it, in float32."""
    import torch

    return _auto(shape).from_pretrained(folder, dtype=torch.float32).eval()


def engine_settings(shape: Shape) -> Json:
    """Return the settings of `engine` beside the usual ones.

    Text needs no vision tower, and transformers imports torchvision for one, whose stand-in for CPUs has names alone.
    """
    if not shape.vision:
        return {"dtype": shape.dtype}
    root = Path(__file__).parents[3]
    env = {"PYTHONPATH": f"{root / 'tests' / 'sglang_cpu'}:{root}"}
    return {"dtype": shape.dtype, "env": env, "extra": {"language_model_only": True}}


def _config(shape: Shape) -> Any:
    from transformers import AutoConfig

    sizes = _TEXT | shape.sizes
    if not shape.vision:
        return AutoConfig.for_model(shape.kind, **_taken(shape.kind, sizes), tie_word_embeddings=shape.tied)
    default = AutoConfig.for_model(shape.kind)
    text_kind = shape.text_kind or default.text_config.model_type
    tied = {"tie_word_embeddings": shape.tied}
    text = _taken(text_kind, sizes) | tied | {"model_type": text_kind}
    vision = shape.vision | {"model_type": default.vision_config.model_type}
    return AutoConfig.for_model(shape.kind, text_config=text, vision_config=vision, **shape.outer, **tied)


def _taken(kind: str, sizes: Json) -> Json:
    """Return the sizes whose names a configuration has, or is not known to lack."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = CONFIG_MAPPING[kind]
    names = {*found().to_dict(), *found.attribute_map}
    names = names.union(*(getattr(one, "__annotations__", {}) for one in found.__mro__))
    optional = {*_TEXT, *_EXPERTS}
    return {name: size for name, size in sizes.items() if name in names or name not in optional}


def _auto(shape: Shape) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText if shape.vision else transformers.AutoModelForCausalLM


def _store_head_twice(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, path, metadata={"format": "pt"})
