"""`rollout-gateway vllm-serve`: the options of `trl vllm-serve` and of `vllm serve`, read as our configuration.

TRL's command starts one vLLM; this one starts `--replicas` of them behind one URL. Reads words, starts nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from engines.config import Section
from engines.errors import ConfigError, UsageError
from engines.levers import LEVERS
from gateway.config.load import validated
from gateway.config.node_gpus import read_gpus
from gateway.config.schema import Config
from gateway.config.sources import Given, Key, put_environment

TRL_PORT = 8000


class Flag(NamedTuple):
    """An option of `trl vllm-serve`, and our key that it sets."""

    name: str
    key: str
    meaning: str


FLAGS = (
    Flag("model", "engine.model", "checkpoint folder or Hugging Face id; the one that must be given"),
    Flag("revision", "engine.extra.revision", "of the model on the Hub"),
    Flag("tensor_parallel_size", "engine.tensor_parallel_size", "GPUs that share each layer of a replica"),
    Flag("data_parallel_size", "engine.data_parallel_size", "copies in one replica; --replicas is the better choice"),
    Flag("host", "gateway.host", "127.0.0.1 unless given; others need gateway.inference_keys and gateway.admin_keys"),
    Flag("port", "gateway.port", f"of the URL that trainers use, {TRL_PORT} unless given"),
    Flag("gpu_memory_utilization", "engine.gpu_memory_utilization", "share of a GPU's memory; vLLM's own unless given"),
    Flag("dtype", "engine.dtype", "auto, bfloat16, float16, float32"),
    Flag("max_model_len", "engine.max_model_len", "prompt plus completion, in tokens"),
    Flag("enable_prefix_caching", "engine.enable_prefix_caching", "true or false; vLLM's own choice unless given"),
    Flag("enforce_eager", "engine.enforce_eager", "true turns CUDA graphs off"),
    Flag("kv_cache_dtype", "engine.kv_cache_dtype", "auto, fp8, ..."),
    Flag("trust_remote_code", "engine.extra.trust_remote_code", "true runs code that comes with the model"),
    Flag("log_level", "engine.extra.uvicorn_log_level", "of vLLM's HTTP server"),
    Flag("vllm_model_impl", "engine.extra.model_impl", "vllm or transformers"),
    Flag("distributed_executor_backend", "engine.extra.distributed_executor_backend", "mp; a replica is on one node"),
    Flag("speculative_config", "engine.speculative_config", "speculative decoding, as JSON"),
)
_KEYS = {flag.name: flag.key for flag in FLAGS} | {lever.name: f"engine.{lever.name}" for lever in LEVERS}
_KEYS |= {"replicas": "engine.num_replicas", "name": "name"}
# Of TRL's options that vLLM reads itself; that of the others the configuration knows.
_NEEDS_VALUE = {flag.name for flag in FLAGS if flag.key.startswith("engine.extra.")} - {"trust_remote_code"} | {"model"}
_OUR_PAIR = re.compile(r"[A-Za-z_]+(\.\w+)+=")  # engine.num_cpus=2, as every verb takes it
_MODEL: Key = ("engine", "model")
_SERVED_NAME: Key = ("engine", "served_model_name")
_RAY_KEY: Key = ("engine", "extra", "distributed_executor_backend")

HELP = f"""Usage: rollout-gateway vllm-serve --model MODEL [--replicas N] [OPTIONS]

Start replicas of one model behind one URL for TRL's trainers: `trl vllm-serve` with --replicas. Stays until Ctrl-C,
or until somebody runs `rollout-gateway down`, and takes everything down that it started.

  --replicas N            vLLM servers behind the URL, 1 unless given
  --gpus 0,1,2,3          GPUs of this node that they may have; the trainer gets the others
  --detach                return when all replicas are ready
  --timeout-s SECONDS     longest wait for them
  --name NAME             of the Serve application

Options of trl vllm-serve, in either spelling (--max_model_len, --max-model-len), and the key that each sets:

{chr(10).join(f"  --{flag.name:<30}{flag.key + ':':<44}{flag.meaning}" for flag in FLAGS)}

Any other option goes to `vllm serve` as it is, and any key of ours can be given: --gateway.max_attempts 5.
"""


class _Own(Section):
    """Options of the command itself."""

    gpus: str | None = None
    detach: bool = False
    timeout_s: float | None = Field(None, gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """One command, parsed."""

    config: Config
    gpus: tuple[str, ...]
    detach: bool
    timeout_s: float | None


def read_command(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServeCommand:
    """Parse a command; environment < words. Errors name the option at fault."""
    given, found = dict(_options(words)), Given()
    found.put(("gateway", "port"), TRL_PORT, "default", "")
    own = _own({name: given.pop(name) for name in _Own.model_fields if name in given})
    for name in _NEEDS_VALUE & given.keys():
        if not isinstance(given[name], str):
            raise UsageError(f"--{name} needs one value, it has {given[name]!r}")
    put_environment(found, environ)
    for name, value in given.items():
        found.put_text(_key(name), value, "cli", f"argument --{name}")
    if not (found.has(_MODEL) and found.value(_MODEL)):
        raise UsageError("--model is missing: a checkpoint folder or a Hugging Face id")
    if not found.has(_SERVED_NAME):
        # AsyncGRPO asks for the model by the name that it was given itself; ours would be the folder's whole path.
        found.put(_SERVED_NAME, found.value(_MODEL), "default", "")
    if found.has(_RAY_KEY) and found.value(_RAY_KEY) == "ray":
        raise ConfigError(
            "--distributed_executor_backend ray: a replica's GPUs are on one node here; leave it out, and raise "
            "--replicas where one node is not enough"
        )
    return ServeCommand(
        config=_with_a_control_port_of_its_own(validated(found), found),
        gpus=read_gpus(own.gpus, environ) if own.gpus is not None else (),
        detach=own.detach,
        timeout_s=own.timeout_s,
    )


def _own(options: dict[str, Any]) -> _Own:
    try:
        return _Own.model_validate(options)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UsageError(f"--{wrong['loc'][0]} = {wrong['input']!r}: {wrong['msg']}") from None


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | bool | list[str]]]:
    """Yield each option with its text; True without a text, False for --no-NAME, a list for several texts."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not re.match(r"--[A-Za-z]", word) and not _OUR_PAIR.match(word):
            raise UsageError(f"{word!r} is no option: write each in full, as --model or --max-model-len")
        name, equals, text = word.removeprefix("--").partition("=")
        name = name if "." in name else name.replace("-", "_")
        values = [text] if equals else []
        while not equals and rest and not re.match(r"--|-[A-Za-z]", rest[0]) and not _OUR_PAIR.match(rest[0]):
            values.append(rest.pop(0))
        if not values and name.startswith("no_"):
            yield name.removeprefix("no_"), False
        else:
            yield name, values if len(values) > 1 else values[0] if values else True


def _key(name: str) -> Key:
    """Return our key of an option: TRL's and vLLM's by their keys, our keys unchanged, the rest for vLLM."""
    if name.partition(".")[0] in Config.model_fields:
        return tuple(name.split(".")) if "." in name else (name,)
    return tuple(_KEYS.get(name, f"engine.extra.{name}").split("."))


def _with_a_control_port_of_its_own(config: Config, given: Given) -> Config:
    """Move Serve's port where it is the rollout port: TRL's default is Serve's default too."""
    if config.gateway.port != config.serve.http_port or given.has(("serve", "http_port")):
        return config
    serve = config.serve.model_copy(update={"http_port": config.gateway.port + 1})
    return config.model_copy(update={"serve": serve})
