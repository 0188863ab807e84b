"""An engine as rules see it, from a gateway's group, verl's rollout section or TRL's colocated vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.types import EngineKind
from gateway.config.load import Setting
from gateway.config.schema import Config
from tuning.doctor.files.trl import TrlFile
from tuning.doctor.files.verl import VerlFile
from tuning.doctor.known_keys import ROLLOUT
from tuning.doctor.model_size import weight_gib
from tuning.doctor.trainer_memory import gpus_of, is_offloaded, resident_gib
from tuning.doctor.values import Values, as_number

# Our levers in verl's rollout section, and True where verl 0.9.1 passes them to SGLang as to vLLM
# (workers/rollout/sglang_rollout/async_sglang_server.py).
_VERL_LEVERS = {
    "tensor_parallel_size": True,
    "data_parallel_size": True,
    "expert_parallel_size": True,
    "dtype": True,
    "gpu_memory_utilization": True,
    "enforce_eager": True,
    "max_num_seqs": True,
    "max_model_len": False,
    "max_num_batched_tokens": False,
    "cudagraph_capture_sizes": False,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "logprobs_mode": False,
    "disable_log_stats": False,
    "seed": False,
}
# The lever whose key has another name there.
_VERL_KEYS = {"tensor_parallel_size": "tensor_model_parallel_size"}
_TRL_LEVERS = {
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
}
# SGLang's names of our levers.
_SGLANG_LEVERS = {"mem_fraction_static": "gpu_memory_utilization", "context_length": "max_model_len"}
# Options of `trl vllm-serve` under another name than our lever.
_SERVE_LEVERS = {"max_model_length": "max_model_len"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """`settings` are by our levers' names, each with the key its file has for it. A lever that is missing or None
    has the engine's own default. `replicas` is None where their number is not given."""

    where: str
    kind: EngineKind
    settings: Mapping[str, Setting]
    model: str
    replicas: int | None
    shares_gpu: bool = False
    """The trainer's own weights and optimiser are on the same GPUs."""
    is_offloaded: bool = False
    """The trainer moves them to the host while the engine runs."""
    resident_gib: float | None = None
    """GiB of each GPU that the trainer keeps at the least while the engine runs; None where that is not known."""
    on_cpu: bool = False
    """It runs on no CUDA GPU: on a CPU, or an accelerator that nothing here was measured on."""
    owner: str = "gateway"
    """The software that starts it: gateway, verl or TRL."""

    def at(self, lever: str) -> Setting | None:
        return self.settings.get(lever)

    def value(self, lever: str) -> Any:
        found = self.settings.get(lever)
        return None if found is None else found.value

    def number(self, lever: str) -> float | None:
        return as_number(self.value(lever))

    @property
    def name(self) -> str:
        return "vLLM" if self.is_vllm else "SGLang"

    @property
    def is_vllm(self) -> bool:
        return self.kind is EngineKind.VLLM

    @property
    def weight_gib(self) -> float | None:
        return weight_gib(self.model)

    @property
    def gpus_of_weights(self) -> float:
        """GPUs that one copy of the weights is spread over: with expert parallelism also those of its data parallel
        ranks."""
        tensor_parallel = self.number("tensor_parallel_size") or 1
        ranks = self.number("data_parallel_size") or 1
        return tensor_parallel * ranks if self.has_expert_parallelism else tensor_parallel

    @property
    def has_expert_parallelism(self) -> bool:
        return self.value("enable_expert_parallel") is True or (self.number("expert_parallel_size") or 1) > 1

    def reaches(self, lever: str) -> bool:
        """True if the lever is passed to the engine."""
        return self.owner != "verl" or self.is_vllm or _VERL_LEVERS.get(lever, True)


def gateway_engines(config: Config, settings: Sequence[Setting]) -> Iterator[EngineView]:
    """Return the groups whose vLLM or SGLang the gateway starts; an external group has no settings here."""
    by_key = {setting.key: setting for setting in settings}
    for name, group in config.groups.items():
        if group.kind not in (EngineKind.VLLM, EngineKind.SGLANG):
            continue
        section = f"engines.{name}." if config.engines else "engine."
        found = {key.removeprefix(section): value for key, value in by_key.items() if key.startswith(section)}
        extra = {key.removeprefix("extra."): value for key, value in found.items() if key.startswith("extra.")}
        yield EngineView(
            where=f"gateway {section[:-1]}",
            kind=group.kind,
            settings=found | extra,
            model=group.model,
            replicas=group.num_replicas,
            on_cpu=group.device == "cpu",
        )


def verl_engine(file: VerlFile) -> EngineView | None:
    """None where verl's rollouts run elsewhere, such as behind a gateway."""
    values = file.values
    # RolloutConfig wants a name, and most of its levers mean the same in both engines.
    name = values.text(ROLLOUT + "name") or ("" if file.has_trainer else "vllm")
    if name not in (EngineKind.VLLM, EngineKind.SGLANG):
        return None
    settings = {
        lever: values.at(ROLLOUT + key)
        for lever in _VERL_LEVERS
        for key in (_VERL_KEYS.get(lever, lever),)
        # A lever that this release does not have is the engine's own choice.
        if file.keys.has(ROLLOUT + key) or values.at(ROLLOUT + key).origin != "default"
    }
    settings |= dict(_engine_kwargs(values, name))
    shares_gpu = file.has_trainer and _is_colocated(file)
    return EngineView(
        where="verl rollout",
        kind=EngineKind(name),
        settings=settings,
        model=values.text("actor_rollout_ref.model.path"),
        replicas=_verl_replicas(values) if file.has_trainer else None,
        shares_gpu=shares_gpu,
        is_offloaded=all(is_offloaded(values, name) for name in ("param", "optimizer")),
        resident_gib=resident_gib(values) if shares_gpu else None,
        on_cpu=values.text("trainer.device") not in ("", "cuda"),
        owner="verl",
    )


def _engine_kwargs(values: Values, engine: str) -> Iterator[tuple[str, Setting]]:
    """Levers that verl passes to its engine as they are, by our names."""
    section = f"{ROLLOUT}engine_kwargs.{engine}."
    for setting in values:
        if setting.key.startswith(section):
            key = setting.key.removeprefix(section)
            yield _SGLANG_LEVERS.get(key) or key, values.at(setting.key)


def _is_colocated(file: VerlFile) -> bool:
    """True if engines run on the trainer's GPUs. Trainers that overlap both have GPUs for each."""
    apart = any(name in file.keys.trainer for name in ("fully_async", "one_step_off"))
    return not apart and file.values.at("actor_rollout_ref.hybrid_engine").value is not False


def _verl_replicas(values: Values) -> int | None:
    """GPUs over the GPUs of one engine, as verl's LLMServerManager counts."""
    gpus = gpus_of(values, ROLLOUT if values.whole(ROLLOUT + "nnodes") else "trainer.")
    sizes = [values.whole(ROLLOUT + key) for key in ("tensor_model_parallel_size", "data_parallel_size")]
    if not gpus or not all(sizes):
        return None
    return max(1, gpus // ((sizes[0] or 1) * (sizes[1] or 1)))


def trl_engine(values: Values, processes: int) -> EngineView | None:
    """vLLM inside TRL's own processes; with vllm_mode: server the engines are another's."""
    if not values.is_true("use_vllm") or values.text("vllm_mode") != "colocate":
        return None
    settings = {lever: values.at(key) for lever, key in _TRL_LEVERS.items()}
    return EngineView(
        where="TRL colocated vLLM",
        kind=EngineKind.VLLM,
        settings=settings,
        model=values.text("model_name_or_path"),
        replicas=max(1, processes // (values.whole("vllm_tensor_parallel_size") or 1)),
        shares_gpu=True,
        is_offloaded=values.is_true("vllm_enable_sleep_mode"),
        owner="TRL",
    )


def trl_server(file: TrlFile) -> EngineView | None:
    """The engine that `trl vllm-serve` starts; None where a script has no such command."""
    if not file.server:
        return None
    levers = {_SERVE_LEVERS.get(name, name): setting for name, setting in file.server.items()}
    model = file.server.get("model")
    return EngineView(
        where="trl vllm-serve",
        kind=EngineKind.VLLM,
        settings=levers,
        model=str(model.value) if model else "",
        replicas=1,
        owner="TRL",
    )
