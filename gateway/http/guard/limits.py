"""Limits for each inference key: requests and tokens in a minute, requests at once."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from engines.errors import TooManyRequests
from gateway.config.schema import KeyLimits

_MINUTE_S = 60.0
_SOON_S = 1.0


class _Bucket:
    """Refills evenly to `limit` in a minute. It may go below zero: tokens are counted after they are made."""

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self._limit, self._now = limit, now
        self._level, self._at = float(limit), now()

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def seconds_until(self, amount: float) -> float:
        """Return the time until so much is there."""
        self._refill()
        return max(0.0, (amount - self._level) * _MINUTE_S / self._limit)

    def _refill(self) -> None:
        now = self._now()
        self._level = min(self._limit, self._level + (now - self._at) * self._limit / _MINUTE_S)
        self._at = now


class Allowance:
    """What one key may still use."""

    def __init__(
        self, limits: KeyLimits, refused: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`refused` counts a refusal under the name of the limit."""
        self._limits = limits
        self._refused = refused
        self._requests = _Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self._tokens = _Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None
        self._running = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count one request while the block runs. Raise `TooManyRequests` over a limit."""
        most = self._limits.requests_at_once
        if most and self._running >= most:
            self._refuse("requests_at_once", f"this key has {self._running} requests under way", _SOON_S)
        self._check(self._tokens, "tokens_per_minute")
        self._check(self._requests, "requests_per_minute")
        if self._requests:
            self._requests.take(1)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def charge(self, tokens: int) -> None:
        """Count tokens of prompts and completions."""
        if self._tokens:
            self._tokens.take(tokens)

    def _check(self, bucket: _Bucket | None, key: str) -> None:
        if bucket and (seconds := bucket.seconds_until(1)):
            used = f"{getattr(self._limits, key)} {key.replace('_', ' ')}"
            self._refuse(key, f"this key has used its {used}", seconds)

    def _refuse(self, key: str, reason: str, retry_after_s: float) -> NoReturn:
        self._refused(key)
        raise TooManyRequests(f"{reason} (gateway.key_limits.{key})", retry_after_s)


class Limits:
    """The allowances of all keys, by name."""

    def __init__(self, config: KeyLimits, refused: Callable[[str, str], None]) -> None:
        """`refused` counts a refusal under the names of the key and of the limit."""
        self._config = config
        self._refused = refused
        self.is_on = config != KeyLimits()
        self._allowances: dict[str, Allowance] = {}

    def of(self, key: str) -> Allowance:
        if key not in self._allowances:
            self._allowances[key] = Allowance(self._config, partial(self._refused, key))
        return self._allowances[key]


def whole_seconds(seconds: float) -> str:
    """Return a Retry-After header."""
    return str(max(1, math.ceil(seconds)))
