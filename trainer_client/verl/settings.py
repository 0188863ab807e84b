"""How verl reaches a gateway: the keys `+trainer.v1.gateway.*` of its configuration, or `ENGINE_KWARGS.*`."""

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from engines.errors import ConfigError
from trainer_client.blocking import BlockingRolloutClient
from trainer_client.client import URL_VARIABLE

SECTION = "trainer.v1.gateway"
"""Of `trainer.v1.trainer_mode=gateway`."""
ENGINE_KWARGS = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gateway"
"""Where verl's own trainers have them."""

Transport = Literal["auto", "store", "gloo", "nccl"]
_DTYPES = ("bfloat16", "float16", "float32")
_TRANSPORTS: tuple[str, ...] = get_args(Transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How verl reaches the gateway. The key of a gateway that wants one is ROLLOUT_API_KEY in the environment."""

    url: str
    """The rollout URL; it may stand in the environment too, as ROLLOUT_URL."""
    transport: Transport = "auto"
    """Of weights: `store` writes a version into the gateway's weight store, `gloo` and `nccl` broadcast it; `auto` is
    the store where its folder is there, else what the engines receive over."""
    store_folder: str | None = None
    """The weight store as the first training worker sees it; what the gateway calls it unless given."""
    dtype: str | None = None
    """What weights are sent in; what the engines hold them in unless given."""
    num_warmup_batches: float = 0
    """Batches of prompts asked for ahead of the training, which makes it asynchronous; 0 is on-policy."""
    rolling: bool | None = None
    """Whether replicas take a version one after the other while the others serve, which the store alone can; as the
    gateway's `weights.rolling` says unless given."""
    abort_at_sync: bool = False
    """Whether rollouts are aborted before a sync and asked for on after it, as verl's own servers do; else they go on
    as the gateway's `weights.in_flight` says. Of verl's own trainers alone."""
    max_in_flight: int = 512
    """Completions that one agent loop worker asks for at a time."""
    rollout_timeout_s: float = 3600.0
    """Longest wait for a completion."""
    sync_timeout_s: float = 600.0
    """Bounds each wait of a weight sync."""
    sync_attempts: int = 3
    """Tries of a sync before the run ends with its error."""
    ready_timeout_s: float = 600.0
    """Longest wait for a complete fleet at the start."""

    def __post_init__(self) -> None:
        if self.transport not in _TRANSPORTS:
            raise ConfigError(f"gateway.transport = {self.transport!r} is none of {', '.join(_TRANSPORTS)}")
        if self.rolling and self.transport in ("gloo", "nccl"):
            raise ConfigError(f"gateway.rolling=True goes with transport=store, not {self.transport}")
        if self.rolling and self.abort_at_sync:
            raise ConfigError("gateway.abort_at_sync=True stops all replicas, which rolling=True is there to avoid")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(f"gateway.dtype = {self.dtype!r} is none of {', '.join(_DTYPES)}")
        for name in ("rollout_timeout_s", "sync_timeout_s", "ready_timeout_s"):
            self._check_number(name, least=0, above=True)
        for name in ("max_in_flight", "sync_attempts"):
            self._check_number(name, least=1)
        self._check_number("num_warmup_batches", least=0)

    def engine_kwargs(self) -> dict[str, Any]:
        """As verl hands them to the checkpoint engine: `rollout.checkpoint_engine.engine_kwargs.gateway`."""
        return asdict(self)

    def _check_number(self, name: str, *, least: float, above: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least or (above and value == least):
            bound = f"above {least:g}" if above else f"at least {least:g}"
            raise ConfigError(f"gateway.{name} = {value!r} must be a number {bound}")


def read_settings(section: Mapping[str, Any], place: str = SECTION) -> Settings:
    """Settings from what stands under `place`. Raises `ConfigError`, which names the key."""
    known = [field.name for field in fields(Settings)]
    for key in section:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there is {', '.join(known)}"
            raise ConfigError(f"{place}.{key} is no setting: {hint}")
    url = section.get("url") or os.environ.get(URL_VARIABLE, "")
    if not url:
        raise ConfigError(f"no rollout URL: give +{place}.url=http://HOST:8100, or set {URL_VARIABLE}")
    return Settings(**{**section, "url": str(url)})


def check_gateway(settings: Settings, rollout: Any) -> int:
    """Length of the engines' context, prompt and response together. Waits for a fleet that is not complete yet.

    `rollout` is verl's section `rollout`. Raises `ConfigError` where the batch would not fit, `DeadlineExceeded` with
    what the fleet lacks, and the gateway's own error.
    """
    with BlockingRolloutClient(settings.url) as client:
        client.wait_ready(settings.ready_timeout_s)
        policy = client.models()[0]
    needed, has = rollout.prompt_length + rollout.response_length, policy["max_model_len"]
    if needed > has:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {needed}, but {policy['id']!r} behind "
            f"{settings.url} takes {has} tokens: start its engines with max_model_len={needed}, or ask for less"
        )
    return int(has)
