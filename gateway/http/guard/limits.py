"""Limits for each inference key: requests and tokens in a minute, requests at once."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    def __init__(self, limits: KeyLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._requests = _Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self._tokens = _Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None
        self._running = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count one request while the block runs. Raise `TooManyRequests` over a limit."""
        most = self._limits.requests_at_once
        if most and self._running >= most:
            raise TooManyRequests(
                f"this key has {self._running} requests under way (gateway.key_limits.requests_at_once)", _SOON_S
            )
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
            limit = getattr(self._limits, key)
            raise TooManyRequests(
                f"this key has used its {limit} {key.replace('_', ' ')} (gateway.key_limits.{key})", seconds
            )


class Limits:
    """The allowances of all keys, by name."""

    def __init__(self, config: KeyLimits) -> None:
        self._config = config
        self._allowances: dict[str, Allowance] = {}

    @property
    def is_on(self) -> bool:
        return self._config != KeyLimits()

    def of(self, key: str) -> Allowance:
        return self._allowances.setdefault(key, Allowance(self._config))


def whole_seconds(seconds: float) -> str:
    """Return a Retry-After header."""
    return str(max(1, math.ceil(seconds)))
