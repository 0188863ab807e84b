"""The configuration of one group of identical engines. Levers have vLLM's names."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic.functional_serializers import PlainSerializer

from engines.types import EngineKind

_SECRET_ARGUMENTS = frozenset({"hf_token", "api_key", "admin_api_key"})

KEY_REFERENCES = ("env:", "file:")


def is_reference(key: SecretStr) -> bool:
    return key.get_secret_value().startswith(KEY_REFERENCES)


Secret = Annotated[
    SecretStr, PlainSerializer(lambda key: key.get_secret_value() if is_reference(key) else str(key), when_used="json")
]
"""A key, or env:NAME or file:PATH, which a dump shows."""

DEFAULT_LOG_DIR = "~/.local/state/rollout-gateway/logs"


class Section(BaseModel):
    """A part of the configuration. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number, which pydantic takes as 1 and 0: an option without a value is true."""
        assert info.field_name is not None
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("a number is needed, and an option without a value is True: give the value")
        return value


def _kinds(annotation: Any) -> set[Any]:
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation)))


class SimConfig(Section):
    """Behaviour of the simulated engine. Speeds are per replica."""

    prefill_tokens_per_s: float = Field(50_000.0, gt=0)
    """Prompt tokens read per second."""
    decode_step_s: float = Field(0.001, ge=0)
    """Seconds of a decode step with one sequence."""
    decode_step_per_seq_s: float = Field(0.00001, ge=0)
    """Seconds added to a decode step by each further sequence."""
    kv_tokens: int = Field(1_000_000, gt=0)
    """Size of the KV cache in tokens; further requests wait."""
    vocab_size: int = Field(1_000, gt=3)
    """Token ids are drawn from 3 (inclusive) to this (exclusive)."""
    mean_tokens: int = Field(32, gt=0)
    """Mean length of a completion that stops by itself (geometric)."""
    start_s: float = Field(0.0, ge=0)
    """Seconds from start to ready, as for a model load."""
    tensors: dict[str, list[int]] = Field(default_factory=lambda: {"weight": [4, 4]})
    """Names and shapes of the model's tensors, which updates are checked against."""
    corrupt_after: int | None = Field(None, ge=0)
    """Number of weight updates after which the engine's weights differ from its label; default: never."""
    corrupt: Literal["previous", "garbage"] = "previous"
    """Weights held after that: those from before the update, or random ones."""
    corrupt_loads: bool = False
    """True if weights loaded from a folder differ from their label."""
    stage_bytes: int = Field(0, ge=0)
    """Free memory for the tensors of an update beside the weights."""
    load_s: float = Field(0.0, ge=0)
    """Seconds to load weights from a folder."""
    logprob_noise: float = Field(0.0, ge=0)
    """Most nats by which a prompt's log-probs vary with the size of the batch, as by rounding; fp8 is like 0.3."""


class EngineConfig(Section):
    """One group of identical engine replicas."""

    kind: EngineKind = EngineKind.VLLM
    """Server to run: vllm, sglang, sim (no model, deterministic tokens, settable speed), external (at `url`)."""
    url: str = ""
    """kind: external: the server's address, http://host:port. Nothing is started; `model` picks one of its models."""
    api_key: Secret | None = None
    """kind: external: the server's bearer key, as env:NAME or file:PATH."""
    python: str = ""
    """Path of the Python that runs the engine, for an engine in another environment; default: the gateway's."""
    model: str = Field("", description="Path of a checkpoint folder, or a Hugging Face model id.")
    served_model_name: str | None = None
    """Model name for clients; default: `model`."""
    frozen: bool = False
    """True for weights that never change: a judge, a reference model. All other groups together are the policy."""
    num_replicas: int = Field(1, ge=1, le=1024)
    """Number of engine servers, or the least of them; each owns tensor x pipeline x data_parallel_size GPUs."""
    max_replicas: int | None = Field(None, ge=1, le=1024)
    """Serve adds replicas up to this number while the gateway has more samples than they run at once, `max_num_seqs`
    each, and removes them again. Default: none is added."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Seconds for which there has to be work for more replicas before Serve adds them."""
    downscale_delay_s: float = Field(600.0, ge=0)
    """Seconds for which fewer replicas have to be enough before Serve removes some: longer than a step of training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engines; auto is CUDA if the installed engine is built for it."""
    num_cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves per replica."""
    gpus_per_replica: float | None = Field(None, ge=0)
    """GPUs that Ray reserves per replica, all on one node; default: one per engine worker, none on CPU. 0.5 lets two
    replicas share a GPU."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share each layer."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages of the layers."""
    data_parallel_size: int = Field(1, ge=1)
    """Copies of the model inside one replica; prefer num_replicas, which restarts copies one by one."""
    api_server_count: int | None = Field(None, ge=1)
    """Processes that parse and stream for one engine; default: the engine's."""
    dtype: Literal["auto", "bfloat16", "float16", "half", "float32", "float"] = "auto"
    """Weights and activations."""
    max_model_len: int | None = Field(None, gt=0)
    """Prompt plus completion, in tokens; default: the model's limit."""
    max_num_seqs: int = Field(256, gt=0)
    """Concurrent sequences per replica."""
    max_num_batched_tokens: int | None = Field(None, gt=0)
    """Tokens of one engine step, prompts and decodes together."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory for vLLM, weights included."""
    kv_cache_memory_bytes: int | None = Field(None, gt=0)
    """KV cache in bytes instead of a share; set it on CPU."""
    enforce_eager: bool = False
    """True turns CUDA graphs off."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes with a CUDA graph; default: the engine's."""
    max_cudagraph_capture_size: int | None = Field(None, gt=0)
    """Largest batch with a CUDA graph; default: the engine's."""
    enable_prefix_caching: bool | None = None
    """Reuse KV of equal prefixes; default: the engine's."""
    enable_chunked_prefill: bool | None = None
    """Cut long prompts into chunks; default: the engine's."""
    kv_cache_dtype: str | None = None
    """auto, fp8, ...; default: the engine's."""
    quantization: str | None = None
    """fp8, awq, ...; default: the checkpoint's. With `fp8` and a plain checkpoint, vLLM quantises in each update
    the tensors that the trainer sends. Updates of a quantised checkpoint are not checked against its tensors."""
    speculative_config: dict[str, Any] | None = None
    """Speculative decoding with vLLM's keys: method, model, num_speculative_tokens, ..."""
    enable_lora: bool = False
    """Take LoRA adapters at run time (POST /v1/load_lora_adapter); needs one copy."""
    max_loras: int = Field(1, ge=1)
    """Adapters in one batch. TRL's AsyncGRPO needs max_staleness + 2."""
    max_cpu_loras: int | None = Field(None, ge=1)
    """Adapters held by one replica; default: max_loras."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Largest rank of an adapter."""
    load_format: str | None = None
    """auto, safetensors, dummy, ...; default: the engine's."""
    seed: int = Field(0, ge=0)
    """Base seed; each replica adds its own number, so that replicas draw different samples."""
    logprobs_mode: str = "processed_logprobs"
    """Trainers need processed_logprobs, the distribution sampled from."""
    max_logprobs: int = -1
    """Limit on log-probabilities per token; -1 is the whole vocabulary."""
    stream_interval: int = Field(32, ge=1)
    """Tokens per streamed chunk; 1 halves vLLM's throughput."""
    disable_log_stats: bool = False
    """Turn off the engine's statistics and its /metrics."""
    weight_transfer: Literal["auto", "nccl", "gloo"] = "auto"
    """Transport of trainer weights: auto is nccl on CUDA, gloo on CPU."""
    env: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(default_factory=dict)
    """Environment variables of the engine process; they override ours. They are in Serve's document, which its
    dashboard shows: leave a token, such as HF_TOKEN, in the node's environment, which engines inherit."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further command-line arguments of the engine, by the engine's names."""
    log_dir: str = DEFAULT_LOG_DIR
    """Folder of the engine logs, one file per start. The default folder keeps the last 200; another is yours."""
    start_timeout_s: float = Field(900.0, gt=0)
    """Limit on an engine's start."""
    drain_timeout_s: float = Field(600.0, ge=0)
    """Time for a removed replica to finish its rollouts; the rest are retried elsewhere."""
    standby: int = Field(0, ge=0, le=1)
    """1: a second engine of each replica sleeps on the replica's GPUs, and takes over within seconds when the first one
    ends. It needs 2 to 5 GB of each GPU: leave them free (`gpu_memory_utilization`)."""
    stop_timeout_s: float = Field(10.0, gt=0)
    """Time between SIGTERM to an engine and SIGKILL to its process group."""
    sim: SimConfig = SimConfig()
    """Behaviour of kind: sim."""

    @model_validator(mode="after")
    def _python_is_an_engines(self) -> Self:
        if self.python and self.kind not in (EngineKind.VLLM, EngineKind.SGLANG):
            raise ValueError(f"python = {self.python!r} is for vLLM and SGLang; remove it from kind: {self.kind}")
        return self

    @model_validator(mode="after")
    def _has_bounds_in_order(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(f"max_replicas = {self.max_replicas} is less than num_replicas = {self.num_replicas}")
        return self

    @model_validator(mode="after")
    def _external_has_a_url(self) -> Self:
        if self.kind is not EngineKind.EXTERNAL:
            if self.url or self.api_key:
                raise ValueError(f"url and api_key are for kind: external; kind: {self.kind} starts its own server")
            return self
        where = urlsplit(self.url)
        if "@" in where.netloc:
            raise ValueError("url has a user or password, and would be shown with it: name the key in api_key instead")
        if where.scheme not in ("http", "https") or not where.hostname or where.path not in ("", "/"):
            raise ValueError(f"url = {self.url!r}: kind: external needs http://host:port, without /v1 or another path")
        if (self.max_replicas or self.num_replicas) != 1:
            raise ValueError(
                f"num_replicas = {self.num_replicas}: one URL is one replica; give each external server a group"
            )
        if self.api_key and not is_reference(self.api_key):
            raise ValueError("api_key must be env:NAME or file:PATH, so that the key is not in the configuration")
        return self

    @model_validator(mode="after")
    def _arguments_hold_no_secrets(self) -> Self:
        for name, value in self.extra.items():
            if isinstance(value, str) and name.replace("-", "_") in _SECRET_ARGUMENTS:
                raise ValueError(
                    f"extra.{name}: all users of a machine see the arguments of processes, so these have no secrets: "
                    "leave it out, and give a token for the Hugging Face hub as HF_TOKEN in the node's environment"
                )
        return self

    @model_validator(mode="after")
    def _a_shared_gpu_has_room(self) -> Self:
        share = self.gpus_per_replica
        if share is None or self.kind is EngineKind.SIM:
            return self
        if self.kind is EngineKind.EXTERNAL:
            raise ValueError(
                f"gpus_per_replica = {share:g}: kind: external runs on GPUs that we do not reserve; leave it out"
            )
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
        if not isinstance(used, int | float) or used * replicas > 1:
            found = "the engine's own choice" if used is None else repr(used)
            raise ValueError(
                f"gpus_per_replica = {share:g} puts {replicas} replicas on a GPU, and {name} = {found} leaves no room "
                f"for them: set it to at most {1 / replicas:.2f}"
            )
        return self

    @model_validator(mode="after")
    def _a_standby_gets_its_weights_from_the_store(self) -> Self:
        reasons = {
            f"kind: {self.kind}": self.kind not in (EngineKind.VLLM, EngineKind.SIM),
            "frozen: true": self.frozen,
            "enable_lora: true": self.enable_lora,
            "a speculative_config": self.speculative_config is not None,
        }
        if self.standby and (found := [name for name, applies in reasons.items() if applies]):
            raise ValueError(
                f"standby = {self.standby} with {found[0]}: a standby is a vLLM whose weights are all loaded when it "
                "wakes; leave standby out, and an engine that ends starts again"
            )
        return self

    @model_validator(mode="after")
    def _adapters_reach_every_copy(self) -> Self:
        if not self.enable_lora:
            return self
        if self.kind is EngineKind.EXTERNAL:
            raise ValueError("enable_lora is for engines that we start; start the external vLLM with --enable-lora")
        for name in ("data_parallel_size", "api_server_count"):
            if (getattr(self, name) or 1) > 1:
                raise ValueError(
                    f"{name} = {getattr(self, name)} with enable_lora: the engine would load an adapter in only one of "
                    "them; raise num_replicas instead"
                )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras = {self.max_cpu_loras} must be at least max_loras = {self.max_loras}")
        return self

    @property
    def log_folder(self) -> Path:
        """`log_dir` on this machine."""
        return Path(self.log_dir).expanduser()

    @property
    def num_adapters(self) -> int:
        """LoRA adapters held by a replica; 0 if it takes none."""
        return (self.max_cpu_loras or self.max_loras) if self.enable_lora else 0

    @property
    def world_size(self) -> int:
        """Workers of one replica, each with a GPU and a rank in weight transfer groups."""
        return self.workers_per_copy * self.data_parallel_size

    @property
    def workers_per_copy(self) -> int:
        """Workers that share one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def served_name(self) -> str:
        """Model name for clients; "" if only the external server knows it."""
        unnamed = "" if self.kind is EngineKind.EXTERNAL else self.kind.value
        return self.served_model_name or self.model or unnamed
