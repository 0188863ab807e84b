"""`rollout-gateway vllm-serve`: the options of `trl vllm-serve` and of `vllm serve`, read as our configuration.

TRL's command starts one vLLM; this one starts `--replicas` of them behind one URL. Reads words, starts nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from engines.errors import ConfigError, UsageError
from engines.levers import LEVERS
from gateway.config.load import validated
from gateway.config.schema import Config
from gateway.config.sources import Given, Key, put_environment

TRL_PORT = 8000
KEYS = {lever.name: f"engine.{lever.name}" for lever in LEVERS} | {
    "model": "engine.model",
    "replicas": "engine.num_replicas",
    "name": "name",
    "host": "gateway.host",
    "port": "gateway.port",
    "log_level": "engine.extra.uvicorn_log_level",
    "vllm_model_impl": "engine.extra.model_impl",
}
"""Our keys of options; any other option is vLLM's own."""
OPTIONS = (
    "--model MODEL, which has to be given, --replicas 1, --host 127.0.0.1, --port 8000, and the other options of "
    "`trl vllm-serve` and of `vllm serve`, in either spelling (--max_model_len, --max-model-len). Any key of ours can "
    "be given too: --gateway.max_attempts 5."
)
_OUR_PAIR = re.compile(r"[A-Za-z_]+(\.\w+)+=")  # engine.num_cpus=2, as every verb takes it
_MODEL: Key = ("engine", "model")
_SERVED_NAME: Key = ("engine", "served_model_name")
_RAY_KEY: Key = ("engine", "extra", "distributed_executor_backend")


def read_options(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Parse a command's options; environment < words. Errors name the option at fault."""
    found = Given()
    found.put(("gateway", "port"), TRL_PORT, "default", "")
    put_environment(found, environ)
    for name, value in _options(words):
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
    return _with_a_control_port_of_its_own(validated(found), found)


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
    return tuple(KEYS.get(name, f"engine.extra.{name}").split("."))


def _with_a_control_port_of_its_own(config: Config, given: Given) -> Config:
    """Move Serve's port where it is the rollout port: TRL's default is Serve's default too."""
    if config.gateway.port != config.serve.http_port or given.has(("serve", "http_port")):
        return config
    serve = config.serve.model_copy(update={"http_port": config.gateway.port + 1})
    return config.model_copy(update={"serve": serve})
