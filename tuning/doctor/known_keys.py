"""The keys of verl and TRL with their defaults: tables that scripts/trainer_keys.py made of one release of each."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

VERL = "verl 0.9.1"
ROLLOUT = "actor_rollout_ref.rollout."
ACTOR = "actor_rollout_ref.actor."
BASE = "ppo_trainer"

_FOLDER = Path(__file__).parent / "known"
# Keys of older releases, with the keys that replaced them.
_RENAMED = {
    "critic.model.fsdp_config": "critic.fsdp",
    f"{ROLLOUT}update_weights_bucket_megabytes": f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes",
    f"{ROLLOUT}tensor_parallel_size": f"{ROLLOUT}tensor_model_parallel_size",
    f"{ROLLOUT}max_prompt_length": f"{ROLLOUT}prompt_length",
    f"{ROLLOUT}max_response_length": f"{ROLLOUT}response_length",
    "trainer.profile_steps": "global_profiler.steps",
}
_TRL_GONE = {
    "max_prompt_length": "TRL no longer cuts prompts; filter them by length in the data set",
    "vllm_guided_decoding_regex": "it is vllm_structured_outputs_regex now",
    "vllm_max_model_len": "it is vllm_max_model_length",
}


@dataclass(frozen=True, slots=True)
class VerlKeys:
    """The keys of one trainer, as Hydra composes them, with their defaults. `is_complete` is False for a trainer that
    verl does not have: its defaults are those of the base, and its own keys are unknown."""

    trainer: str
    defaults: Mapping[str, Any]
    is_complete: bool = True

    def has(self, key: str) -> bool:
        """True for a key and for a section of keys."""
        return key in self.defaults or any(known.startswith(f"{key}.") for known in self.defaults)

    def is_free(self, key: str) -> bool:
        """True below a dictionary that takes any key with a plus, such as an engine's own arguments."""
        parents = [key.rsplit(".", cut)[0] for cut in range(1, key.count(".") + 1)]
        return any(isinstance(self.defaults.get(parent, 0), (dict, type(None))) for parent in parents)

    def renamed(self, key: str) -> str:
        """The key that replaced a key of an older release; "" where none did."""
        found = (new + key.removeprefix(old) for old, new in _RENAMED.items() if f"{key}.".startswith(f"{old}."))
        return "" if self.has(key) else next(filter(self.has, found), "")

    def nearest(self, key: str) -> str:
        """The key of the same section with the nearest spelling; "" where none is like it."""
        section, _, name = key.rpartition(".")
        here = [known.rpartition(".")[2] for known in self.defaults if known.rpartition(".")[0] == section]
        close = difflib.get_close_matches(name, here, n=1, cutoff=0.75)
        return f"{section}.{close[0]}".lstrip(".") if close else ""


@cache
def verl_keys(trainer: str = BASE) -> VerlKeys:
    """The keys of a trainer by the name of its configuration, such as ppo_megatron_trainer, with the choices of groups
    behind it. Those of an unknown trainer are the base's."""
    table = _table()
    if trainer == BASE:
        return VerlKeys(trainer, table["base"])
    own = table["others"].get(trainer)
    if own is None:
        return VerlKeys(trainer, table["base"], is_complete=False)
    without = tuple(f"{section}." for section in own["without"])
    kept = {key: value for key, value in table["base"].items() if not f"{key}.".startswith(without)}
    return VerlKeys(trainer, kept | own["keys"])


@cache
def trainer_names() -> tuple[str, ...]:
    """The trainers of verl, the base first."""
    return (BASE, *_table()["others"])


def trainer_of_module(module: str) -> str:
    """The configuration that a Python module takes of its own accord; "" for a module that verl does not have."""
    found: str = _table()["modules"].get(module, "")
    return found


@cache
def rollout_config() -> dict[str, Any]:
    """The defaults of RolloutConfig, which people build by themselves."""
    found: dict[str, Any] = _table()["rollout_config"]
    return found


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / "verl-0.9.1.json").read_text(encoding="utf-8"))
    return found


@cache
def trl_defaults() -> dict[str, Any]:
    """The fields of GRPOConfig."""
    table: dict[str, Any] = json.loads((_FOLDER / "trl-1.16.0.json").read_text(encoding="utf-8"))
    return table


# Fields of the classes that TRL's scripts read from the same YAML or command line.
_OF_MODEL_AND_DATA = re.compile(r"(lora|bnb|dataset|load_in|model|attn|use_(peft|dora|rslora|bnb))(_|$)|dtype$")


def nearest_trl_field(name: str) -> str:
    """The field to write instead of a field that GRPOConfig does not have; "" where none is like it."""
    if name in _TRL_GONE:
        return _TRL_GONE[name]
    if _OF_MODEL_AND_DATA.match(name):
        return ""
    close = difflib.get_close_matches(name, trl_defaults(), n=1, cutoff=0.75)
    return close[0] if close else ""
