"""Settings of verl for a gateway: keys `+trainer.v1.gateway.*` of its configuration."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engines.errors import ConfigError
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.client import URL_VARIABLE

SECTION = "trainer.v1.gateway"

Seconds = Annotated[float, Meta(gt=0, lt=1e9)]
Number = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connection and weight sync of verl. The gateway's key, if any, is ROLLOUT_API_KEY in the environment."""

    url: str
    """The rollout URL; default: ROLLOUT_URL in the environment."""
    transport: Literal["auto", "store", "gloo", "nccl"] = "auto"
    """Weight transport: `store` writes a version to the gateway's weight store, `gloo` and `nccl` broadcast it; `auto`
    is the store if its folder exists here, else the engines' group."""
    store_folder: str | None = None
    """Path of the weight store for the first training worker; default: the gateway's path."""
    num_warmup_batches: Annotated[float, Meta(ge=0)] = 0
    """Batches of prompts requested ahead of training, which makes it asynchronous; 0 is on-policy."""
    max_in_flight: Number = 512
    """Concurrent completions per agent loop worker."""
    rollout_timeout_s: Seconds = 3600.0
    """Limit on the wait for a completion."""
    sync_timeout_s: Seconds = 600.0
    """Limit on each wait of a weight sync."""
    sync_attempts: Number = 3
    """Tries of a sync before the run ends with its error."""
    ready_timeout_s: Seconds = 600.0
    """Limit on the wait for a complete fleet at the start."""


def read_settings(section: Mapping[str, Any]) -> Settings:
    """Return the settings of a section. Raises `ConfigError`, which names the key."""
    url = section.get("url") or os.environ.get(URL_VARIABLE, "")
    if not url:
        raise ConfigError(f"no rollout URL: give +{SECTION}.url=http://HOST:8100, or set {URL_VARIABLE}")
    try:
        return msgspec.convert({**section, "url": str(url)}, Settings)
    except msgspec.ValidationError as error:
        given = {name: value for name, value in section.items() if name != "url"}
        raise ConfigError(
            f"{SECTION}: {error}, in {given}; settings are {', '.join(Settings.__struct_fields__)}"
        ) from None


def check_gateway(settings: Settings, rollout: Any) -> int:
    """Wait for a complete fleet. Return the engines' context length in tokens.

    `rollout` is verl's section `rollout`. Raises `ConfigError` if the batch would not fit, `DeadlineExceeded` with
    the missing replicas, and the gateway's error.
    """
    with BlockingRolloutClient(settings.url) as client:
        client.wait_ready(settings.ready_timeout_s)
        policy = client.call("GET", "/v1/models")["data"][0]
    needed, has = rollout.prompt_length + rollout.response_length, policy["max_model_len"]
    if needed > has:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {needed}, but {policy['id']!r} behind "
            f"{settings.url} takes {has} tokens: start its engines with max_model_len={needed}, or lower the lengths"
        )
    return int(has)
