"""The keys of verl and TRL with their defaults: tables that scripts/trainer_keys.py made of several releases of verl
and of one of TRL."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.tuning.doctor.files.hydra_override import HydraOverride

TRL = "TRL 1.16.0"
ROLLOUT = "actor_rollout_ref.rollout."
ACTOR = "actor_rollout_ref.actor."
BASE = "ppo_trainer"

_FOLDER = Path(__file__).parent / "known"
_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?.*")
# New names that spelling alone does not find.
_RENAMED = {
    "critic.model.fsdp_config": "critic.fsdp",
    f"{ROLLOUT}update_weights_bucket_megabytes": f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes",
    f"{ROLLOUT}tensor_parallel_size": f"{ROLLOUT}tensor_model_parallel_size",
    f"{ROLLOUT}max_prompt_length": f"{ROLLOUT}prompt_length",
    f"{ROLLOUT}max_response_length": f"{ROLLOUT}response_length",
    "trainer.profile_steps": "global_profiler.steps",
    "reward_model": "reward.reward_model",
    "custom_reward_function": "reward.custom_reward_function",
}
_TRL_GONE = {
    "max_prompt_length": "TRL no longer cuts prompts; filter them by length in the data set",
    "vllm_guided_decoding_regex": "it is vllm_structured_outputs_regex now",
    "vllm_max_model_len": "it is vllm_max_model_length",
}


@dataclass(frozen=True, slots=True)
class VerlKeys:
    """The keys of one trainer of one release, as Hydra composes them, with their defaults. `is_complete` is False for a
    trainer that the release does not have: its defaults are those of the base, and its own keys are unknown."""

    release: str
    trainer: str
    defaults: Mapping[str, Any]
    is_complete: bool = True

    @property
    def name(self) -> str:
        return f"verl {self.release}"

    def is_at_least(self, *release: int) -> bool:
        """True for that release, such as 0, 7, and later ones."""
        return _numbers(self.release) >= release

    def has(self, key: str) -> bool:
        """True for a key and for a section of keys."""
        return key in self.defaults or self.is_section(key)

    def is_section(self, key: str) -> bool:
        return any(known.startswith(f"{key}.") for known in self.defaults)

    def is_free(self, key: str) -> bool:
        """True below a dictionary that takes any key with a plus, such as an engine's own arguments."""
        parents = [key.rsplit(".", cut)[0] for cut in range(1, key.count(".") + 1)]
        return any(isinstance(self.defaults.get(parent, 0), (dict, type(None))) for parent in parents)

    def nearest(self, key: str) -> str:
        """The key that was probably meant; "" where none is like it. It is always a key of this trainer."""
        for old, new in _RENAMED.items():
            if (key == old or key.startswith(f"{old}.")) and self.has(new + key.removeprefix(old)):
                return new + key.removeprefix(old)
        section, _, name = key.rpartition(".")
        here = [known.rpartition(".")[2] for known in self.defaults if known.rpartition(".")[0] == section]
        if close := difflib.get_close_matches(name, here, n=1, cutoff=0.75):
            return f"{section}.{close[0]}" if section else close[0]
        same_name = [known for known in self.defaults if known.rpartition(".")[2] == name]
        close = difflib.get_close_matches(key, same_name, n=1, cutoff=0.75)
        return close[0] if close else ""


class Composition:
    """The configuration that Hydra composes from overrides, in their order."""

    def __init__(self, keys: VerlKeys) -> None:
        self._keys = keys
        self._values: dict[str, Any] = dict(keys.defaults)

    def refusal(self, override: HydraOverride) -> str:
        """Why Hydra refuses an override, "" where it takes it. What it takes counts for the next."""
        key, plus = override.key, override.plus
        is_there = key in self._values or any(known.startswith(f"{key}.") for known in self._values)
        reason = ""
        if plus == "" and not is_there:
            reason = "has no such key"
        elif plus == "+" and self._stands(key) and not isinstance(override.value, (dict, list)):
            reason = "has this key already, and takes it without a plus"
        elif plus == "~" and not self._stands(key):
            reason = "has no such key to leave out"
        if not reason and plus != "~":
            self._values[key] = override.value
        return reason

    def _stands(self, key: str) -> bool:
        """True if there is a value or a section; null is neither."""
        value = self._values.get(key)
        if isinstance(value, str) and "oc.select" in value and value.rstrip("} ").endswith(("null", ",")):
            return False  # an interpolation whose own default is null
        return value is not None or any(known.startswith(f"{key}.") for known in self._values)


@cache
def verl_releases() -> tuple[str, ...]:
    """Releases that have a table, the oldest first."""
    names = (path.stem.removeprefix("verl-") for path in _FOLDER.glob("verl-*.json"))
    return tuple(sorted(names, key=_numbers))


def release_of(version: str) -> str:
    """The release whose table serves for a version: the newest that is not newer, else the oldest. Without a version
    the newest. Raises `ConfigError` on what is no version."""
    releases = verl_releases()
    if not version:
        return releases[-1]
    if not _RELEASE.fullmatch(version):
        raise ConfigError(f"argument --verl-version: {version!r}: expected a release such as {releases[-1]}")
    return next((release for release in reversed(releases) if _numbers(release) <= _numbers(version)), releases[0])


@cache
def verl_keys(trainer: str = BASE, version: str = "") -> VerlKeys:
    """The keys of a trainer by the name of its configuration, such as ppo_megatron_trainer, with the choices of groups
    behind it. Those of an unknown trainer are the base's."""
    table = _table(release_of(version))
    if trainer == BASE:
        return VerlKeys(table["release"], trainer, table["base"])
    own = table["others"].get(trainer)
    if own is None:
        return VerlKeys(table["release"], trainer, table["base"], is_complete=False)
    without = tuple(f"{section}." for section in own["without"])
    kept = {key: value for key, value in table["base"].items() if not f"{key}.".startswith(without)}
    return VerlKeys(table["release"], trainer, kept | own["keys"])


@cache
def trainer_names(version: str = "") -> tuple[str, ...]:
    """The trainers of a release, the base first."""
    return (BASE, *_table(release_of(version))["others"])


def trainer_of_module(module: str, version: str = "") -> str:
    """The configuration that a Python module takes of its own accord; "" for a module that verl does not have."""
    found: str = _table(release_of(version))["modules"].get(module, "")
    return found


@cache
def rollout_config() -> dict[str, Any]:
    """The defaults of RolloutConfig, which people build by themselves."""
    found: dict[str, Any] = _table(verl_releases()[-1])["rollout_config"]
    return found


@cache
def _table(release: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / f"verl-{release}.json").read_text(encoding="utf-8"))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    found = _RELEASE.fullmatch(version)
    return tuple(int(number or 0) for number in found.groups()) if found else ()


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
