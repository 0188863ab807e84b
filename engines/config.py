"""What one group of identical engines is: one pydantic class, whose levers carry vLLM's names."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engines.types import EngineKind


class SimConfig(BaseModel):
    """How the simulated engine behaves. Its speeds are those of one replica."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prefill_tokens_per_s: float = Field(50_000.0, gt=0)
    """Prompt tokens read per second."""
    decode_step_s: float = Field(0.001, ge=0)
    """Seconds of one decode step with one sequence running."""
    decode_step_per_seq_s: float = Field(0.00001, ge=0)
    """Seconds that each further running sequence adds to a decode step."""
    kv_tokens: int = Field(1_000_000, gt=0)
    """Tokens that fit in the KV cache; what does not fit waits."""
    vocab_size: int = Field(1_000, gt=3)
    """Token ids are drawn from 3 (inclusive) to this (exclusive)."""
    mean_tokens: int = Field(32, gt=0)
    """Mean length of a completion that ends by itself (geometric)."""
    start_s: float = Field(0.0, ge=0)
    """Seconds from start to ready, to stand for a model load."""
    tensors: dict[str, list[int]] = Field(default_factory=lambda: {"weight": [4, 4]})
    """Names and shapes of the tensors that an update must bring."""


class EngineConfig(BaseModel):
    """One group of identical engine replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: EngineKind = EngineKind.VLLM
    """Which server to run: vllm, or sim (no model, deterministic tokens, settable speed)."""
    model: str = Field("", description="Path of a checkpoint folder, or a Hugging Face model id.")
    served_model_name: str | None = None
    """The name clients use; the value of `model` unless given."""
    num_replicas: int = Field(1, ge=1, le=1024)
    """How many engine servers; each owns tensor_parallel_size x pipeline_parallel_size GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines run; auto takes CUDA where the installed engine is built for it."""
    num_cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for one replica."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share each layer."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages that the layers are cut into."""
    dtype: str = "auto"
    """Weights and activations: auto, bfloat16, float16, float32."""
    max_model_len: int | None = Field(None, gt=0)
    """Prompt plus completion, in tokens; the model's own limit unless given."""
    max_num_seqs: int = Field(256, gt=0)
    """Sequences that one replica runs at a time."""
    max_num_batched_tokens: int | None = Field(None, gt=0)
    """Tokens of one engine step, prompts and decodes together."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes in all."""
    kv_cache_memory_bytes: int | None = Field(None, gt=0)
    """KV cache in bytes instead of a share; on CPU always give it."""
    enforce_eager: bool = False
    """True turns CUDA graphs off."""
    enable_prefix_caching: bool | None = None
    """Reuse KV of equal prefixes; the engine's default unless given."""
    enable_chunked_prefill: bool | None = None
    """Cut long prompts into chunks; the engine's default unless given."""
    kv_cache_dtype: str | None = None
    """auto, fp8, ...; the engine's default unless given."""
    load_format: str | None = None
    """auto, safetensors, dummy, ...; the engine's default unless given."""
    seed: int = Field(0, ge=0)
    """Each replica adds a number of its own, so that equal prompts do not give equal samples on two replicas."""
    logprobs_mode: str = "processed_logprobs"
    """processed_logprobs is what was sampled from, which trainers need."""
    max_logprobs: int = -1
    """Most log-probabilities a request may ask for; -1 is the whole vocabulary."""
    stream_interval: int = Field(32, ge=1)
    """Tokens per streamed chunk; 1 halves vLLM's throughput."""
    weight_transfer: Literal["auto", "nccl", "gloo"] = "auto"
    """How trainers send weights: auto is nccl on CUDA and gloo on CPU."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the engine process, on top of what the adapter sets."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of the engine's command line, by the engine's own name."""
    log_dir: str = "/tmp/rollout-gateway/logs"
    """Folder of the engines' log files, one a start."""
    start_timeout_s: float = Field(900.0, gt=0)
    """Longest start before it counts as failed."""
    stop_timeout_s: float = Field(10.0, gt=0)
    """Grace between asking an engine to end and killing its process group."""
    sim: SimConfig = SimConfig()
    """How kind: sim behaves."""

    @property
    def world_size(self) -> int:
        """Workers of one replica: GPUs it owns, and ranks it takes in a weight transfer group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model or self.kind.value
