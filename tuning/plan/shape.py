"""The shape of a decoder-only model: parameters, KV cache and work of a token, read from Hugging Face's config.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import ConfigError, UsageError
from engines.model_folder import cached_folder

_ATTENTION = ("full_attention", "sliding_attention", "attention")
# Keys of models whose layers keep a state instead of a KV cache.
_STATEFUL = (
    "linear_num_key_heads", "linear_attn_config", "mamba_d_state", "ssm_cfg", "state_size", "full_attention_interval",
)  # fmt: skip
# One layer in so many has full attention, where config.json has no layer_types.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
_ALL_SLIDE = ("mistral", "mixtral")  # where config.json has a window
# Keys that are whole numbers where a model has them, from 1 and from 0 on. No model has more of anything.
_FROM_ONE = (
    "num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok", "sliding_window_pattern",
    "q_lora_rank", "kv_lora_rank", "max_position_embeddings",
)  # fmt: skip
_FROM_ZERO = (
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "shared_expert_intermediate_size",
    "first_k_dense_replace", "sliding_window",
)  # fmt: skip
_LISTS = ("layer_types", "mlp_only_layers")
_MOST = 10**8
# Bytes a weight with the scales of its group: 4 bits in groups of 128 with zeros, MXFP4 in groups of 32.
_FOUR_BITS, _MXFP4 = 0.52, 0.53125
_PLAIN = 2.0  # bfloat16, which embeddings and head keep
# Models whose config.json leaves `tie_word_embeddings` out where it is true.
_TIED = ("gemma",)
_BIASED = ("qwen2",)  # and their config.json does not say so


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture: each token takes `used` of `count` experts of `parameters` each, in every layer of `layers`."""

    count: int
    used: int
    layers: int
    parameters: float

    @property
    def all_parameters(self) -> float:
        return self.layers * self.count * self.parameters

    def touched(self, tokens: float) -> float:
        """Parameters that a step of so many tokens reads: those of each expert that any token takes."""
        missed: float = (1 - self.used / self.count) ** tokens
        return self.all_parameters * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts are of the whole model, over all layers."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    """1 where all heads share one latent (MLA), which every GPU of a tensor parallel group then holds whole."""
    kv_values: int
    """Numbers that the KV cache holds of one token."""
    attention_width: int
    """The width of a token's queries, over all layers: to look at one token before it takes 4 FLOPs for each."""
    dense_parameters: float
    """Those that every token is multiplied with: layers without their routed experts, and the head."""
    embedding_parameters: float
    """Parameters of the input embedding where the head is another matrix: looked up, never multiplied."""
    experts: Experts | None
    weight_bytes_each: float
    """Bytes of a weight in a layer; embeddings and head keep two bytes in quantized checkpoints."""
    expert_bytes_each: float
    sliding_share: float
    """The share of the KV cache in layers that look at `window` tokens alone."""
    window: int
    positions: int | None
    block: int = 1
    """Weights of a row that share a scale: the inputs of a matrix on each GPU are a multiple of it."""

    @property
    def parameters(self) -> float:
        routed = self.experts.all_parameters if self.experts else 0.0
        return self.dense_parameters + self.embedding_parameters + routed

    @property
    def active_parameters(self) -> float:
        """Multiplied with for one token."""
        experts = self.experts
        return self.dense_parameters + (experts.layers * experts.used * experts.parameters if experts else 0.0)

    @property
    def weight_bytes(self) -> float:
        return self._dense_bytes + self.embedding_parameters * self._head_bytes + self._routed_bytes

    def bytes_on_gpu(self, tensor_parallel: int, data_parallel: int = 1) -> float:
        """Bytes of weights on each GPU. Data parallel ranks share the routed experts and hold the rest themselves."""
        rest = self.weight_bytes - self._routed_bytes
        return rest / tensor_parallel + self._routed_bytes / (tensor_parallel * data_parallel)

    def read_bytes(self, tokens: float, tensor_parallel: int = 1, data_parallel: int = 1) -> float:
        """Bytes of weights that each GPU reads for a step of so many tokens of each data parallel rank."""
        routed = self.experts.touched(tokens * data_parallel) if self.experts else 0.0
        shared = routed * self.expert_bytes_each / data_parallel
        return (self._dense_bytes + shared) / tensor_parallel

    def lora_parameters(self, rank: int) -> float:
        """Parameters of an adapter of all matrices of a layer but its routed experts."""
        queries, keys = self.attention_width / self.layers, self.kv_values / self.layers / 2
        attention = 4 * self.hidden + 2 * queries + 2 * keys
        feed_forward = 0 if self.experts else 3 * (self.hidden + self.intermediate)
        return rank * self.layers * (attention + feed_forward)

    def kv_bytes(self, tensor_parallel: int, length: float = 0) -> float:
        """Bytes of one token on each GPU of a tensor parallel group, in a sequence of `length` tokens, whose sliding
        layers hold their window alone; 0 is a sequence within it. Heads that are fewer than GPUs are held twice."""
        beyond = max(0.0, 1 - self.window / length) if length and self.window else 0.0
        held = self.kv_values * (1 - self.sliding_share * beyond)
        return held * 2.0 / min(tensor_parallel, self.kv_heads)

    @property
    def _head_bytes(self) -> float:
        return max(self.weight_bytes_each, _PLAIN)

    @property
    def _dense_bytes(self) -> float:
        head = self.vocabulary * self.hidden
        return (self.dense_parameters - head) * self.weight_bytes_each + head * self._head_bytes

    @property
    def _routed_bytes(self) -> float:
        return self.experts.all_parameters * self.expert_bytes_each if self.experts else 0.0

    def splits_into(self, tensor_parallel: int) -> bool:
        """True if heads and blocks of quantized weights can be split evenly; the engines' own rule."""
        kv = self.kv_heads
        heads = self.heads % tensor_parallel == 0 and (kv % tensor_parallel == 0 or tensor_parallel % kv == 0)
        expert = self.experts.parameters / (3 * self.hidden) if self.experts else self.intermediate
        blocks = all(width % (tensor_parallel * self.block) == 0 for width in (self.intermediate, expert))
        return tensor_parallel == 1 or (heads and blocks)


def read_shape(model: Path | None, given: Sequence[str] = ()) -> ModelShape:
    """The shape of a checkpoint folder or config.json, with `KEY=VALUE` in its own words over it, or of those alone.

    Raises `ConfigError` naming the key that is missing or wrong.
    """
    config: dict[str, Any] = {} if model is None else _read(model)
    text = dict(config.get("text_config") or config) | dict(_pair(part) for part in given)
    name = model.name if model and model.name != "config.json" else (model.parent.name if model else "model")
    return shape_of(text, name, quantization=config.get("quantization_config"))


def shape_of(config: Mapping[str, Any], name: str, *, quantization: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape that the keys of a config.json describe. Raises `ConfigError` naming a key that cannot be."""
    _check(config, name)
    if others := sorted({str(kind) for kind in config.get("layer_types") or ()} - set(_ATTENTION)):
        raise ConfigError(f"{name}: layers of {', '.join(others)} keep no KV cache that is known here")
    if state := [key for key in _STATEFUL if config.get(key)]:
        raise ConfigError(f"{name}: cannot size this: its layers keep a state ({state[0]}) and no KV cache known here")
    layers, hidden, heads = (
        _whole(config, key, name) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    vocabulary, intermediate = (_whole(config, key, name) for key in ("vocab_size", "intermediate_size"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    if not head:
        raise ConfigError(f"{name}: hidden_size = {hidden} is less than num_attention_heads = {heads}")
    if config.get("kv_lora_rank"):
        attention, kv_values, width = _latent(config, name, hidden, heads)
        kv_heads = 1
    else:
        bias = (heads + 2 * kv_heads) * head if _has_bias(config) else 0
        attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head + bias
        kv_values, width = 2 * kv_heads * head, heads * head
    experts, dense_mlp = _feed_forward(config, name, layers, hidden, intermediate)
    try:
        (dense_bytes, expert_bytes), block = _weight_bytes(config, quantization), _block(quantization or {})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: cannot size this: quantization_config: {error}") from error
    sliding_share, window = _sliding(config, layers)
    tied = config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith(_TIED))
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        kv_values=layers * kv_values,
        attention_width=layers * width,
        dense_parameters=layers * (attention + 2 * hidden) + dense_mlp + hidden + vocabulary * hidden,
        embedding_parameters=0.0 if tied else float(vocabulary * hidden),
        experts=experts,
        weight_bytes_each=dense_bytes,
        expert_bytes_each=expert_bytes,
        sliding_share=sliding_share,
        window=window,
        positions=config.get("max_position_embeddings"),
        block=block,
    )


def _latent(config: Mapping[str, Any], name: str, hidden: int, heads: int) -> tuple[int, int, int]:
    """Multi-head latent attention (DeepSeek-V2 and its kin): parameters, KV values and query width of a layer."""
    rank, rope, nope, value = (
        _whole(config, key, name) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    query_rank = config.get("q_lora_rank")
    width = heads * (nope + rope)
    query = query_rank * (hidden + width) if query_rank else hidden * width
    parameters = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    # Queries look at the latent itself while decoding.
    return parameters, rank + rope, heads * (rank + rope)


def _feed_forward(
    config: Mapping[str, Any], name: str, layers: int, hidden: int, intermediate: int
) -> tuple[Experts | None, float]:
    """The routed experts, and the parameters that every token uses, of all layers."""
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if not count:
        return None, 3.0 * layers * hidden * intermediate
    expert = int(config.get("moe_intermediate_size") or intermediate)
    plain = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    shared += int(config.get("n_shared_experts") or 0) * expert
    mixed = layers - plain
    if mixed < 1:
        raise ConfigError(
            f"{name}: {plain} of {layers} layers without experts (first_k_dense_replace, mlp_only_layers)"
        )
    dense = 3.0 * hidden * (plain * intermediate + mixed * shared) + mixed * hidden * int(count)
    used = int(config.get("num_experts_per_tok") or 1)
    if used > count:
        raise ConfigError(f"{name}: num_experts_per_tok = {used}, and there are {count} experts")
    return Experts(count=int(count), used=used, layers=mixed, parameters=3.0 * hidden * expert), dense


def _has_bias(config: Mapping[str, Any]) -> bool:
    return bool(config.get("attention_bias", config.get("model_type") in _BIASED))


def _sliding(config: Mapping[str, Any], layers: int) -> tuple[float, int]:
    """The share of layers that look at a window of tokens alone, and the window."""
    window, kind = config.get("sliding_window"), str(config.get("model_type", ""))
    if not window or config.get("use_sliding_window") is False:
        return 0.0, 0
    if kinds := config.get("layer_types"):
        return list(kinds).count("sliding_attention") / len(kinds), window
    if every := int(config.get("sliding_window_pattern") or _FULL_EVERY.get(kind, 0)):
        return 1 - (layers // every) / layers, window
    return (1.0, window) if kind in _ALL_SLIDE else (0.0, 0)


def _weight_bytes(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> tuple[float, float]:
    """Bytes of a weight in a layer, and in a routed expert."""
    if not quantization:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        each = 1.0 if dtype == "float8_e4m3fn" else _PLAIN  # engines load float32 checkpoints as bfloat16
        return each, each
    if str(quantization.get("quant_method", "")) == "mxfp4":
        return _PLAIN, _MXFP4  # of experts alone
    bits = _bits(quantization)
    each = _FOUR_BITS if bits == 4 else bits / 8
    return each, each


def _block(quantization: Mapping[str, Any]) -> int:
    """Inputs of a matrix that share a scale: FP8's blocks of columns, groups of AWQ and GPTQ; 1 where engines pad."""
    blocks = quantization.get("weight_block_size")
    if blocks:
        return int(blocks[-1])
    size = quantization.get("group_size")
    return size if type(size) is int and size > 0 else 1


def _bits(quantization: Mapping[str, Any]) -> float:
    """Bits of a quantized weight, in the words of AWQ, GPTQ, bitsandbytes, compressed-tensors and FP8."""
    groups = quantization.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    four = 4 if quantization.get("load_in_4bit") else None
    return float(quantization.get("bits") or quantization.get("weight_bits") or weights.get("num_bits") or four or 8)


def _read(model: Path) -> dict[str, Any]:
    folder = model if model.exists() else cached_folder(str(model))
    if folder is None:
        raise ConfigError(
            f"--model {str(model)!r}: neither a folder here nor a Hugging Face id whose config.json is cached; run "
            "`hf download ID config.json`, or give the model's numbers with --shape (plan --help has some)"
        )
    path = folder if folder.is_file() else folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model {str(model)!r}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--model {str(model)!r}: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--model {str(model)!r}: {path} holds no object")
    return found


def _pair(part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals:
        raise UsageError(f"--shape {part!r}: expected KEY=VALUE with a key of config.json, such as hidden_size=3584")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value


def _check(config: Mapping[str, Any], name: str) -> None:
    for keys, least in ((_FROM_ONE, 1), (_FROM_ZERO, 0)):
        for key in keys:
            value = config.get(key)
            if value is not None and not (type(value) is int and least <= value <= _MOST):
                raise ConfigError(f"{name}: {key} = {value!r} is no whole number from {least} to {_MOST}")
    for key in _LISTS:
        if not isinstance(config.get(key) or [], list):
            raise ConfigError(f"{name}: {key} = {config[key]!r} is no list")


def _whole(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= _MOST:
        problem = "is missing" if value is None else f"= {value!r} is no whole number from 1 to {_MOST}"
        raise ConfigError(f"{name}: {key} {problem}; give it with --shape {key}=NUMBER")
    return value
