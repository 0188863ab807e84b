"""Published models: keys of their config.json, the bytes of their checkpoints, and machines that are published to hold
them."""

from dataclasses import dataclass, field
from typing import Any

from tuning.plan.gpu import GPUS, Gpu
from tuning.plan.question import Question
from tuning.plan.shape import ModelShape, shape_of
from tuning.plan.speed import fitted
from tuning.plan.workload import Lengths, StepWorkload

Config = dict[str, Any]

_UNTIED = {"tie_word_embeddings": False}


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": 152064}
    return {"model_type": "qwen2", "max_position_embeddings": 32768} | sizes | _UNTIED


def _qwen3_moe(layers: int, hidden: int, heads: int, experts: int, expert: int) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "head_dim": 128}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 4 * expert, "moe_intermediate_size": expert}
    sizes |= {"num_experts": experts, "num_experts_per_tok": 8, "vocab_size": 151936}
    return {"model_type": "qwen3_moe", "max_position_embeddings": 40960} | sizes | _UNTIED


_LLAMA_70B: Config = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072,
} | _UNTIED  # fmt: skip
_DEEPSEEK: Config = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840,
} | _UNTIED  # fmt: skip
_GEMMA3_27B: Config = {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
    "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
}  # fmt: skip
_GPT_OSS_120B: Config = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
    "num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": True, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
} | _UNTIED  # fmt: skip
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_PER_TENSOR_FP8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


@dataclass(frozen=True, kw_only=True)
class Published:
    """`gigabytes` are those of the safetensors files, of 10^9 bytes."""

    config: Config
    gigabytes: float
    quantization: Config = field(default_factory=dict)

    def shape(self, name: str) -> ModelShape:
        return shape_of(self.config, name, quantization=self.quantization)


MODELS = {
    # Dense
    "Qwen2.5-7B": Published(config=_qwen2(28, 3584, 28, 4, 18944), gigabytes=15.231),
    "Llama-3.1-70B": Published(config=_LLAMA_70B, gigabytes=141.107),
    # Mixture of experts
    "Qwen3-30B-A3B": Published(config=_qwen3_moe(48, 2048, 32, 128, 768), gigabytes=61.064),
    # Latent attention, FP8; with the layer for multi-token prediction, which engines do not load
    "DeepSeek-V3": Published(config=_DEEPSEEK, gigabytes=688.587, quantization=_FP8),
    # Sliding windows; with the vision tower
    "gemma-3-27b": Published(config=_GEMMA3_27B, gigabytes=54.865),
    # FP8
    "Llama-3.1-70B-FP8": Published(config=_LLAMA_70B, gigabytes=72.7, quantization=_PER_TENSOR_FP8),
    # Four bits
    "Qwen2.5-7B-AWQ": Published(config=_qwen2(28, 3584, 28, 4, 18944), gigabytes=5.58, quantization=_AWQ),
    "gpt-oss-120b": Published(config=_GPT_OSS_120B, gigabytes=65.249, quantization={"quant_method": "mxfp4"}),
}
# Trained by verl's examples in bfloat16.
TRAINED = {
    "Qwen2-7B": _qwen2(28, 3584, 28, 4, 18944),
    "Qwen2.5-14B": _qwen2(48, 5120, 40, 8, 13824),
    "Qwen2.5-32B": _qwen2(64, 5120, 40, 8, 27648),
    "Qwen2-72B": _qwen2(80, 8192, 64, 8, 29568),
    "Qwen3-30B-A3B": _qwen3_moe(48, 2048, 32, 128, 768),
    "Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 128, 1536),
    "DeepSeek-V3": _DEEPSEEK,
}
MACHINES: dict[str, tuple[Gpu, int]] = {
    "8 x H100": (GPUS["H100"], 8),
    "8 x H200": (GPUS["H200"], 8),
    "4 x L40S": (GPUS["L40S"], 4),
}


def work(prompt: int, response: int, prompts: int = 128, samples: int = 8) -> StepWorkload:
    return StepWorkload(
        prompts=prompts,
        samples=samples,
        prompt=Lengths(prompt / 2, prompt),
        response=Lengths(response / 2, response),
    )


def question(shape: ModelShape, gpu: Gpu, gpus: int, **given: Any) -> Question:
    given.setdefault("work", work(1024, 4096))
    return Question(shape=shape, gpu=gpu, gpus=gpus, speeds=fitted(), **given)
