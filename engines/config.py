"""What one group of identical engines is: one pydantic class, whose levers carry vLLM's names."""

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

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
    eager_step_s: float = Field(0.0, ge=0)
    """Seconds that a decode step without a CUDA graph takes longer: every one with `enforce_eager`, else those of more
    sequences than `max_cudagraph_capture_size` (512)."""
    prefill_step_s: float = Field(0.0, ge=0)
    """Seconds of each step that reads prompts, beside those of its tokens; `max_num_batched_tokens` go into one."""
    kv_tokens: int = Field(1_000_000, gt=0)
    """Tokens that fit in the KV cache; what does not fit waits."""
    kv_tokens_per_batched_token: float = Field(0.0, ge=0)
    """Tokens of KV cache whose memory goes to the activations of each of `max_num_batched_tokens`."""
    vocab_size: int = Field(1_000, gt=3)
    """Token ids are drawn from 3 (inclusive) to this (exclusive)."""
    mean_tokens: int = Field(32, gt=0)
    """Mean length of a completion that ends by itself (geometric)."""
    start_s: float = Field(0.0, ge=0)
    """Seconds from start to ready, to stand for a model load."""
    tensors: dict[str, list[int]] = Field(default_factory=lambda: {"weight": [4, 4]})
    """Names and shapes of the tensors that an update must bring."""
    corrupt_after: int | None = Field(None, ge=0)
    """Weight updates after which the engine holds other weights than it says; never unless given."""
    corrupt: Literal["previous", "garbage"] = "previous"
    """What it holds then: the weights from before the update, or none that any update brought."""
    corrupt_loads: bool = False
    """True where weights loaded from a folder are then other ones than it says."""
    load_s: float = Field(0.0, ge=0)
    """Seconds that a load of weights from a folder takes."""
    logprob_noise: float = Field(0.0, ge=0)
    """Nats by which a prompt's log-probs differ when it is read beside others, as rounding does on real engines."""


class EngineConfig(BaseModel):
    """One group of identical engine replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: EngineKind = EngineKind.VLLM
    """Which server to run: vllm, sglang, sim (no model, deterministic tokens, settable speed), external (at `url`)."""
    url: str = ""
    """kind: external: where the server listens, http://host:port. Nothing is started, and `model` picks one of its."""
    api_key: SecretStr | None = None
    """kind: external: the server's bearer key, as env:NAME or file:PATH."""
    python: str = ""
    """The Python that runs the engine, by its path, for an engine in another environment; ours unless given."""
    model: str = Field("", description="Path of a checkpoint folder, or a Hugging Face model id.")
    served_model_name: str | None = None
    """The name clients use; the value of `model` unless given."""
    frozen: bool = False
    """True where weights never change: a judge, a reference model. Groups that are not frozen are one policy."""
    num_replicas: int = Field(1, ge=1, le=1024)
    """How many engine servers; each owns tensor x pipeline x data_parallel_size GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines run; auto takes CUDA where the installed engine is built for it."""
    num_cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for one replica."""
    gpus_per_replica: float | None = Field(None, ge=0)
    """GPUs that Ray reserves for one replica, all on one node: as many as the engine has workers, none on CPU, unless
    given. 0.5 lets two replicas share a GPU."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share each layer."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages that the layers are cut into."""
    data_parallel_size: int = Field(1, ge=1)
    """Copies of the model inside one replica; num_replicas, which restarts them one by one, is the better choice."""
    api_server_count: int | None = Field(None, ge=1)
    """Processes that parse and stream for one engine; the engine's default unless given."""
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
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes that have a CUDA graph; the engine's own choice unless given."""
    max_cudagraph_capture_size: int | None = Field(None, gt=0)
    """Largest batch that has a CUDA graph; the engine's own choice unless given."""
    enable_prefix_caching: bool | None = None
    """Reuse KV of equal prefixes; the engine's default unless given."""
    enable_chunked_prefill: bool | None = None
    """Cut long prompts into chunks; the engine's default unless given."""
    kv_cache_dtype: str | None = None
    """auto, fp8, ...; the engine's default unless given."""
    quantization: str | None = None
    """fp8, awq, ...; what the checkpoint says unless given. Updates are then not checked against the checkpoint."""
    speculative_config: dict[str, Any] | None = None
    """Speculative decoding in vLLM's words: method, model, num_speculative_tokens, ..."""
    enable_lora: bool = False
    """True to take LoRA adapters at run time: POST /v1/load_lora_adapter. One copy and one API server only."""
    max_loras: int = Field(1, ge=1)
    """Adapters that the sequences of one batch may use. TRL's AsyncGRPO wants max_staleness + 2."""
    max_cpu_loras: int | None = Field(None, ge=1)
    """Adapters that one replica holds; max_loras unless given."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Largest rank of an adapter."""
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
    disable_log_stats: bool = False
    """True turns the engine's statistics off, its /metrics with them."""
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
    drain_timeout_s: float = Field(600.0, ge=0)
    """Longest that a replica which is removed goes on with its rollouts; what is left is generated anew elsewhere."""
    stop_timeout_s: float = Field(10.0, gt=0)
    """Grace between asking an engine to end and killing its process group."""
    sim: SimConfig = SimConfig()
    """How kind: sim behaves."""

    @model_validator(mode="after")
    def _python_is_an_engines(self) -> Self:
        if self.python and self.kind not in (EngineKind.VLLM, EngineKind.SGLANG):
            raise ValueError(f"python = {self.python!r}: it runs vLLM or SGLang; kind: {self.kind} has no use for it")
        return self

    @model_validator(mode="after")
    def _external_has_a_url(self) -> Self:
        if self.kind is not EngineKind.EXTERNAL:
            if self.url or self.api_key:
                raise ValueError(f"url and api_key are for kind: external; kind: {self.kind} starts its own server")
            return self
        where = urlsplit(self.url)
        if where.scheme not in ("http", "https") or not where.hostname or where.path not in ("", "/"):
            raise ValueError(f"url = {self.url!r}: kind: external needs http://host:port, without /v1 or another path")
        if self.num_replicas != 1:
            raise ValueError(
                f"num_replicas = {self.num_replicas}: one URL is one replica; give each external server a group"
            )
        if self.api_key and not self.api_key.get_secret_value().startswith(("env:", "file:")):
            raise ValueError("api_key must be env:NAME or file:PATH: a key written out here would be seen by many")
        return self

    @model_validator(mode="after")
    def _a_shared_gpu_has_room(self) -> Self:
        share = self.gpus_per_replica
        if share is None or self.kind is EngineKind.SIM:
            return self
        if self.kind is EngineKind.EXTERNAL:
            raise ValueError(f"gpus_per_replica = {share:g}: kind: external has its GPUs elsewhere; leave it out")
        if share == self.world_size or (share == 0 and self.device == "cpu"):
            return self
        if not 0 < share < 1 or self.world_size > 1:
            raise ValueError(
                f"gpus_per_replica = {share:g}: an engine of {self.world_size} workers takes {self.world_size} GPUs; "
                "leave it out, or give a share below 1 to an engine of one worker"
            )
        name, used = "gpu_memory_utilization", self.extra.get("gpu_memory_utilization", self.gpu_memory_utilization)
        if self.kind is EngineKind.SGLANG:
            name, used = "extra.mem_fraction_static", self.extra.get("mem_fraction_static")
        replicas = int(1 / share)
        if used is None or used * replicas > 1:
            found = "the engine's own choice" if used is None else f"{used:g}"
            raise ValueError(
                f"gpus_per_replica = {share:g} puts {replicas} replicas on a GPU, and {name} = {found} leaves no room "
                f"for them: set it to at most {1 / replicas:.2f}"
            )
        return self

    @model_validator(mode="after")
    def _adapters_reach_every_copy(self) -> Self:
        if not self.enable_lora:
            return self
        if self.kind is EngineKind.EXTERNAL:
            raise ValueError("enable_lora is for engines that we start; an external vLLM needs --enable-lora itself")
        for name in ("data_parallel_size", "api_server_count"):
            if (count := getattr(self, name) or 1) > 1:
                raise ValueError(
                    f"{name} = {count} with enable_lora: the engine would load an adapter in one of them alone; raise "
                    "num_replicas instead"
                )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras = {self.max_cpu_loras} must be at least max_loras = {self.max_loras}")
        return self

    @property
    def num_adapters(self) -> int:
        """LoRA adapters that a replica holds at a time; 0 where it takes none."""
        return (self.max_cpu_loras or self.max_loras) if self.enable_lora else 0

    @property
    def world_size(self) -> int:
        """Workers of one replica: GPUs it owns, and ranks it takes in a weight transfer group."""
        return self.workers_per_copy * self.data_parallel_size

    @property
    def workers_per_copy(self) -> int:
        """Workers that hold one copy of the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def served_name(self) -> str:
        """The name clients use; "" where only the server that somebody else runs knows it."""
        unnamed = "" if self.kind is EngineKind.EXTERNAL else self.kind.value
        return self.served_model_name or self.model or unnamed
