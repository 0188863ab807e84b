"""Conflicts between configuration and checkpoint, found before an engine is started.

The rules are start failures of vLLM 0.28 to 0.32 and SGLang 0.5.23. A checkpoint on another node or only in
the hub is not checked.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.model_folder import model_folder
from engines.types import EngineKind

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_METHODS = ("awq", "gptq", "fp8", "bitsandbytes", "mxfp4", "gguf")
"""Quantization methods of which none loads the checkpoints of another. One may have faster kernels: awq_marlin."""
# Variables that turn off the engines' limit.
_LONGER = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
# Arguments that change the config.json seen by the engine.
_OVERRIDES = ("hf_overrides", "hf_config_path", "json_model_override_args", "config_format")

Model = Mapping[str, Any]
"""The content of config.json, with that of its `text_config`."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A field of `EngineConfig` whose value cannot work; `message` has reason and remedy."""

    field: str
    value: Any
    message: str


def misfits(config: EngineConfig) -> list[Misfit]:
    """Return all known conflicts. Reads config.json, in milliseconds."""
    if config.kind not in (EngineKind.VLLM, EngineKind.SGLANG):
        return []
    told = [("max_num_batched_tokens", _step(config))]
    if folder := model_folder(config):
        model, problem = _model(config, folder)
        told.append(("model", problem))
        if model and not any(name in config.extra for name in _OVERRIDES):
            told += [(field, rule(config, model)) for field, rule in _RULES.items()]
    return [Misfit(field, getattr(config, field), message) for field, message in told if message]


def _step(config: EngineConfig) -> str:
    tokens = config.max_num_batched_tokens
    if config.kind is EngineKind.SGLANG or tokens is None or tokens >= config.max_num_seqs:
        return ""
    return f"a step cannot hold engine.max_num_seqs = {config.max_num_seqs}; raise it, or lower max_num_seqs"


def _model(config: EngineConfig, folder: Path) -> tuple[Model, str]:
    """Return the model of a folder, and why it cannot be served."""
    file = folder / "config.json"
    if not file.is_file():
        is_mistrals = (folder / "params.json").is_file()  # a format of its own
        return {}, "" if is_mistrals else "the folder has no config.json, so it is not a checkpoint"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        model = {**found, **(found.get("text_config") or {})}
    except (ValueError, AttributeError, TypeError) as error:
        return {}, f"its config.json cannot be read: {error}"
    reads_weights = config.load_format in (None, "auto", "safetensors")
    if reads_weights and not any(path.suffix in _WEIGHTS for path in folder.iterdir()):
        return model, "the folder has no weights (*.safetensors); for random weights set engine.load_format = dummy"
    return model, ""


def _heads(config: EngineConfig, model: Model) -> str:
    """Check the split of heads. Both engines split attention heads and KV heads into equal shares; if there are fewer
    KV heads than GPUs, each GPU holds a copy of one, evenly distributed."""
    gpus, heads = config.tensor_parallel_size, model.get("num_attention_heads")
    if not isinstance(heads, int) or gpus == 1:
        return ""
    kv_heads = model.get("num_key_value_heads")
    kv_heads = heads if not isinstance(kv_heads, int) or "kv_lora_rank" in model else kv_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if gpus in fits:
        return ""
    *others, last = map(str, fits)
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"the model has {heads} attention heads and {kv_heads} KV heads; it can be {listed}"


def _layers(config: EngineConfig, model: Model) -> str:
    layers = model.get("num_hidden_layers")
    is_too_deep = isinstance(layers, int) and config.pipeline_parallel_size > layers
    return f"the model has {layers} layers; lower it" if is_too_deep else ""


def _length(config: EngineConfig, model: Model) -> str:
    limit, scaling = model.get("max_position_embeddings"), model.get("rope_scaling") or model.get("rope_parameters")
    if config.max_model_len is None or not isinstance(limit, int) or "factor" in str(scaling):
        return ""
    longest = max(limit, model.get("model_max_length") or 0)
    if config.max_model_len <= longest or any(config.env.get(name, "0") not in ("", "0") for name in _LONGER):
        return ""
    return f"the model's own limit is {longest} tokens (max_position_embeddings); lower it or leave it out"


def _quantization(config: EngineConfig, model: Model) -> str:
    asked, said = config.quantization, model.get("quantization_config") or {}
    has = said.get("quant_method") if isinstance(said, dict) else None
    if asked != has and asked in _METHODS and has in _METHODS:
        return f"the checkpoint is quantised with {has}; leave it out to use that"
    if config.kind is EngineKind.SGLANG and asked == "fp8" and not has and not config.frozen:
        return (
            "an update ends an SGLang that has quantised its weights itself; set kind = vllm, or frozen = true where "
            "no trainer updates them"
        )
    return ""


_RULES: dict[str, Callable[[EngineConfig, Model], str]] = {
    "tensor_parallel_size": _heads,
    "pipeline_parallel_size": _layers,
    "max_model_len": _length,
    "quantization": _quantization,
}
