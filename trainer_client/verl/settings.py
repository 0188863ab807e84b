"""Settings of verl for a gateway: keys `+trainer.v1.gateway.*` of its configuration."""

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from engines.errors import ConfigError
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.client import URL_VARIABLE

SECTION = "trainer.v1.gateway"

Transport = Literal["auto", "store", "gloo", "nccl"]
_TRANSPORTS: tuple[str, ...] = get_args(Transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Connection and weight sync of verl. The gateway's key, if any, is ROLLOUT_API_KEY in the environment."""

    url: str
    """The rollout URL; default: ROLLOUT_URL in the environment."""
    transport: Transport = "auto"
    """Weight transport: `store` writes a version to the gateway's weight store, `gloo` and `nccl` broadcast it; `auto`
    is the store if its folder exists here, else the engines' group."""
    store_folder: str | None = None
    """Path of the weight store for the first training worker; default: the gateway's path."""
    num_warmup_batches: float = 0
    """Batches of prompts requested ahead of training, which makes it asynchronous; 0 is on-policy."""
    max_in_flight: int = 512
    """Concurrent completions per agent loop worker."""
    rollout_timeout_s: float = 3600.0
    """Limit on the wait for a completion."""
    sync_timeout_s: float = 600.0
    """Limit on each wait of a weight sync."""
    sync_attempts: int = 3
    """Tries of a sync before the run ends with its error."""
    ready_timeout_s: float = 600.0
    """Limit on the wait for a complete fleet at the start."""

    def __post_init__(self) -> None:
        if self.transport not in _TRANSPORTS:
            raise ConfigError(f"gateway.transport = {self.transport!r} must be one of {', '.join(_TRANSPORTS)}")
        for name in ("rollout_timeout_s", "sync_timeout_s", "ready_timeout_s"):
            self._check_number(name, least=0, above=True)
        for name in ("max_in_flight", "sync_attempts"):
            self._check_number(name, least=1)
        self._check_number("num_warmup_batches", least=0)

    def _check_number(self, name: str, *, least: float, above: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least or (above and value == least):
            bound = f"above {least:g}" if above else f"at least {least:g}"
            raise ConfigError(f"gateway.{name} = {value!r} must be a number {bound}")


def read_settings(section: Mapping[str, Any]) -> Settings:
    """Return the settings of a section. Raises `ConfigError`, which names the key."""
    known = [field.name for field in fields(Settings)]
    for key in section:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"settings are {', '.join(known)}"
            raise ConfigError(f"{SECTION}.{key} is not a setting: {hint}")
    url = section.get("url") or os.environ.get(URL_VARIABLE, "")
    if not url:
        raise ConfigError(f"no rollout URL: give +{SECTION}.url=http://HOST:8100, or set {URL_VARIABLE}")
    return Settings(**{**section, "url": str(url)})


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
