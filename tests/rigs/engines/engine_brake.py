"""Holds a real engine still behind the gateway's back: at once, or by itself where its samples have so many tokens."""

from collections.abc import Callable
from typing import Any

from engines.types import Dialect

Call = Callable[[str, Any], tuple[int, Any]]
"""Path and body to status and reply of the engine."""


class VllmBrake:
    """A vLLM with `halting.py`."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def pause(self) -> None:
        self._ask("/pause?mode=keep", {})

    def resume(self) -> None:
        self._ask("/resume", {})

    def halt_at(self, samples: int, tokens: int) -> None:
        """See `Halt.at`."""
        self._ask("/collective_rpc", {"method": "halt_at", "kwargs": {"samples": samples, "tokens": tokens}})

    def is_paused(self) -> bool:
        return bool(self._ask("/is_paused", None)["is_paused"])

    def _ask(self, path: str, body: Any) -> Any:
        status, reply = self._call(path, body)
        assert status == 200, reply
        return reply


class SglangBrake(VllmBrake):
    """An SGLang with the plugin of `tests/sglang_cpu/halting.py`."""

    def pause(self) -> None:
        self._ask("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        self._ask("/continue_generation", {})

    def halt_at(self, samples: int, tokens: int) -> None:
        assert self._state(halt_samples=samples, halt_tokens=tokens)

    def is_paused(self) -> bool:
        return self._state(is_paused=1)

    def _state(self, **numbers: int) -> bool:
        (answer,) = self._ask("/set_internal_state", {"server_args": numbers})
        return bool(answer)


BRAKES = {Dialect.VLLM: VllmBrake, Dialect.SGLANG: SglangBrake}
