"""What verl and TRL can be told, with their defaults: tables that scripts/trainer_keys.py made of two releases."""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

VERL = "verl 0.9.1"
TRL = "TRL 1.16.0"
ROLLOUT = "actor_rollout_ref.rollout."

_FOLDER = Path(__file__).parent / "known"
# Sections whose keys are somebody else's: an engine's arguments, Ray's, those of verl's trainer behind a gateway.
_FREE = (
    "hydra.",
    "ray_kwargs.ray_init.",
    "trainer.v1.gateway.",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.",
    "actor_rollout_ref.rollout.custom.",
    "actor_rollout_ref.rollout.server.",
)
# Where spelling alone would not find it.
_RENAMED = {
    "critic.model.fsdp_config": "critic.fsdp",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    "actor_rollout_ref.rollout.tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_prompt_length": "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.max_response_length": "actor_rollout_ref.rollout.response_length",
    "trainer.profile_steps": "global_profiler.steps",
}
_TRL_GONE = {
    "max_prompt_length": "TRL no longer cuts prompts; filter them by length in the data set",
    "vllm_guided_decoding_regex": "it is vllm_structured_outputs_regex now",
    "vllm_max_model_len": "it is vllm_max_model_length",
}


@dataclass(frozen=True, slots=True)
class VerlKeys:
    """`added` are keys that Hydra takes with a leading plus alone. `of_trainers` are those that only some trainers
    have, by what these are called in a command."""

    defaults: dict[str, Any]
    of_trainers: dict[str, dict[str, Any]]
    added: frozenset[str]
    rollout_config: dict[str, Any]

    def of(self, trainers: Iterable[str]) -> "VerlKeys":
        """The keys that these trainers have too, or only one of them."""
        own = {key: default for name in trainers for key, default in self.of_trainers[name].items()}
        return replace(self, defaults=self.defaults | own, added=self.added - own.keys())

    def knows(self, key: str) -> bool:
        if key in self.defaults or key in self.added or key.startswith(_FREE):
            return True
        parents = [key.rsplit(".", cut)[0] for cut in range(1, key.count(".") + 1)]
        is_section = any(known.startswith(f"{key}.") for known in self.defaults)
        return is_section or any(self.defaults.get(parent, 0) in ({}, None) for parent in parents)

    def nearest(self, key: str) -> str:
        """The key that was probably meant; "" where none is like it."""
        for old, new in _RENAMED.items():
            if key == old or key.startswith(f"{old}."):
                return new + key.removeprefix(old)
        section, _, name = key.rpartition(".")
        here = [known.rpartition(".")[2] for known in self.defaults if known.rpartition(".")[0] == section]
        if close := difflib.get_close_matches(name, here, n=1):
            return f"{section}.{close[0]}"
        same_name = [known for known in self.defaults if known.rpartition(".")[2] == name]
        close = difflib.get_close_matches(key, same_name, n=1, cutoff=0.3) or difflib.get_close_matches(
            key, self.defaults, n=1, cutoff=0.8
        )
        return close[0] if close else ""


@cache
def verl_keys() -> VerlKeys:
    table = json.loads((_FOLDER / "verl-0.9.1.json").read_text(encoding="utf-8"))
    return VerlKeys(table["keys"], table["of_trainers"], frozenset(table["added"]), table["rollout_config"])


@cache
def trl_defaults() -> dict[str, Any]:
    """The fields of GRPOConfig."""
    table: dict[str, Any] = json.loads((_FOLDER / "trl-1.16.0.json").read_text(encoding="utf-8"))
    return table


def nearest_trl_field(name: str) -> str:
    """What to write instead of a field that GRPOConfig does not have; "" where nothing is like it."""
    if name in _TRL_GONE:
        return _TRL_GONE[name]
    close = difflib.get_close_matches(name, trl_defaults(), n=1, cutoff=0.75)
    return close[0] if close else ""
