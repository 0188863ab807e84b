"""Conflicts between configuration and checkpoint, found before an engine is started.

The rules are start failures of vLLM 0.28 to 0.32 and SGLang 0.5.23. A checkpoint on another node or only in
the hub, and an engine that is not installed, are not checked.
"""

import ast
import difflib
import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.model_folder import model_folder
from engines.process.interpreter import interpreter_of
from engines.types import EngineKind

_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NAMES = {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}
# Places of the list of quantization methods in each engine's source: package, then file and name.
_QUANTIZATIONS: dict[EngineKind, tuple[str, tuple[tuple[str, str], ...]]] = {
    EngineKind.VLLM: ("vllm", (("model_executor/layers/quantization/__init__.py", "QuantizationMethods"),)),
    EngineKind.SGLANG: (
        "sglang",
        (
            ("srt/arg_groups/choices.py", "QUANTIZATION_CHOICES"),
            ("srt/server_args.py", "QUANTIZATION_CHOICES"),
        ),
    ),
}
_ASK_FOLDER = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]).submodule_search_locations[0])"
_ASK_TIMEOUT_S = 30.0
# Variables that turn off the engines' limit.
_LONGER = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
# Arguments that change the config.json seen by the engine.
_OVERRIDES = ("hf_overrides", "hf_config_path", "json_model_override_args", "config_format")


@dataclass(frozen=True, slots=True)
class Misfit:
    """A field of `EngineConfig` whose value cannot work; `message` has reason and remedy."""

    field: str
    value: Any
    message: str


def misfits(config: EngineConfig) -> list[Misfit]:
    """Return all known conflicts. Reads config.json, in milliseconds."""
    if config.kind not in _NAMES:
        return []
    found = list(_levers(config))
    if folder := model_folder(config):
        found += _checkpoint(config, folder)
    return found


def _levers(config: EngineConfig) -> Iterator[Misfit]:
    engine = _NAMES[config.kind]
    if config.dtype not in _DTYPES:
        yield Misfit("dtype", config.dtype, f"{engine} has no such dtype{_near(config.dtype, _DTYPES)}")
    if config.quantization is not None:
        known = _quantizations(config)
        if known and config.quantization not in known:
            near = _near(config.quantization, known)
            yield Misfit("quantization", config.quantization, f"the installed {engine} has no such method{near}")
    tokens = config.max_num_batched_tokens
    if config.kind is EngineKind.VLLM and tokens is not None and tokens < config.max_num_seqs:
        message = f"a step cannot hold engine.max_num_seqs = {config.max_num_seqs}; raise it, or lower max_num_seqs"
        yield Misfit("max_num_batched_tokens", tokens, message)


def _checkpoint(config: EngineConfig, folder: Path) -> Iterator[Misfit]:
    if not (folder / "config.json").is_file():
        if not (folder / "params.json").is_file():  # Mistral's own format
            yield Misfit("model", config.model, "the folder has no config.json, so it is not a checkpoint")
        return
    if config.load_format in (None, "auto", "safetensors") and not _has_weights(folder):
        message = "the folder has no weights (*.safetensors); for random weights set engine.load_format = dummy"
        yield Misfit("model", config.model, message)
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = model.get("text_config") or model
    except (ValueError, AttributeError) as error:
        yield Misfit("model", config.model, f"its config.json cannot be read: {error}")
        return
    if any(name in config.extra for name in _OVERRIDES):
        return
    for rule in _RULES:
        yield from rule(config, model if rule is _quantization else text)


def _heads(config: EngineConfig, model: Mapping[str, Any]) -> Iterator[Misfit]:
    """Check the split of heads. Both engines split attention heads and KV heads into equal shares; if there are fewer
    KV heads than GPUs, each GPU holds a copy of one, evenly distributed."""
    gpus, heads = config.tensor_parallel_size, model.get("num_attention_heads")
    if not isinstance(heads, int) or gpus == 1:
        return
    kv_heads = model.get("num_key_value_heads")
    kv_heads = heads if not isinstance(kv_heads, int) or "kv_lora_rank" in model else kv_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if gpus not in fits:
        message = f"the model has {heads} attention heads and {kv_heads} KV heads; it can be {_listed(fits)}"
        yield Misfit("tensor_parallel_size", gpus, message)


def _layers(config: EngineConfig, model: Mapping[str, Any]) -> Iterator[Misfit]:
    layers, stages = model.get("num_hidden_layers"), config.pipeline_parallel_size
    if isinstance(layers, int) and stages > layers:
        yield Misfit("pipeline_parallel_size", stages, f"the model has {layers} layers; lower it")


def _length(config: EngineConfig, model: Mapping[str, Any]) -> Iterator[Misfit]:
    asked, limit = config.max_model_len, model.get("max_position_embeddings")
    scaling = model.get("rope_scaling") or model.get("rope_parameters") or {}
    if asked is None or not isinstance(limit, int) or "factor" in str(scaling):
        return
    longest = max(limit, model.get("model_max_length") or 0)
    if asked > longest and not any(config.env.get(name, "0") not in ("", "0") for name in _LONGER):
        message = f"the model's own limit is {longest} tokens (max_position_embeddings); lower it or leave it out"
        yield Misfit("max_model_len", asked, message)


def _quantization(config: EngineConfig, model: Mapping[str, Any]) -> Iterator[Misfit]:
    """Check the method: a quantised checkpoint takes its own or a faster kernel for it, such as awq_marlin."""
    asked, said = config.quantization, model.get("quantization_config") or {}
    has = said.get("quant_method") if isinstance(said, dict) else None
    if asked and isinstance(has, str) and asked.partition("_")[0] != has.partition("_")[0] and _is_plain(asked, has):
        message = f"the checkpoint is quantised with {has}; leave it out to use that"
        yield Misfit("quantization", asked, message)
    if config.kind is EngineKind.SGLANG and asked == "fp8" and not has and not config.frozen:
        message = (
            "an update ends an SGLang that has quantised its weights itself; set kind = vllm, or frozen = true where "
            "no trainer updates them"
        )
        yield Misfit("quantization", asked, message)


_RULES: tuple[Callable[[EngineConfig, Mapping[str, Any]], Iterator[Misfit]], ...] = (
    _heads,
    _layers,
    _length,
    _quantization,
)


def _is_plain(asked: str, has: str) -> bool:
    """Return True if no kernel of one method serves the other."""
    plain = ("awq", "gptq", "fp8", "bitsandbytes", "mxfp4", "gguf")
    return asked in plain and has in plain


def _has_weights(folder: Path) -> bool:
    return any(path.suffix in _WEIGHTS for path in folder.iterdir())


def _quantizations(config: EngineConfig) -> tuple[str, ...]:
    """Return the installed engine's methods, () if unknown. Read from its source, since an import takes seconds."""
    package, places = _QUANTIZATIONS[config.kind]
    folder = _folder_of(package, config)
    for file, name in places if folder else ():
        path = Path(folder) / file
        if path.is_file() and (found := _strings(path, name)):
            return found
    return ()


def _folder_of(package: str, config: EngineConfig) -> str:
    """Return the package's folder in the engine's Python, without importing it; "" if not installed."""
    engine = interpreter_of(config)
    if engine.is_ours:
        spec = importlib.util.find_spec(package)
        return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""
    try:
        return engine.last_line(_ASK_FOLDER, _ASK_TIMEOUT_S, package)
    except (OSError, subprocess.SubprocessError):
        return ""  # the start reports it


def _strings(path: Path, name: str) -> tuple[str, ...]:
    """Return the strings in the assignment to `name` in a source file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return tuple(
                part.value
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
    return ()


def _near(word: str, words: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; it has {', '.join(words)}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
