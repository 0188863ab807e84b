"""An attempt's error is in the owner what it was in the worker, and an error of placing the other way round."""

import inspect
from typing import Any

import pytest

from engines import errors
from engines.errors import (
    EngineError,
    EngineFailed,
    EngineUnreachable,
    InvalidRequest,
    RolloutGatewayError,
)
from gateway.api import shortened
from gateway.http.workers.failures import packed, unpacked

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, RolloutGatewayError) and kind.__module__ == errors.__name__
]
DECIDING = (EngineError, InvalidRequest)
"""Errors whose fields decide about the next attempt, or are the client's."""


def made(kind: type[RolloutGatewayError]) -> RolloutGatewayError:
    parameters: dict[str, Any] = {
        "status": 429,
        "body": {"error": "no"},
        "known": True,
        "replica_id": "engine-0",
        "param": "a",
    }
    names = inspect.signature(kind.__init__).parameters
    return kind("the reason", **{name: value for name, value in parameters.items() if name in names})


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_keeps_its_class_and_words(kind: type[RolloutGatewayError]) -> None:
    error = made(kind)
    if isinstance(error, EngineError):
        error.retry_after_s = 2.5
    there = unpacked(packed(error))
    assert type(there) is kind
    assert str(there) == str(error)
    for field in ("param", "replica_id", "retry_after_s", "status") if isinstance(error, DECIDING) else ():
        assert getattr(there, field, None) == getattr(error, field, None)


def test_an_error_of_another_module_is_the_nearest_that_both_processes_know() -> None:
    class OfAnotherModule(EngineFailed):
        pass

    assert type(unpacked(packed(OfAnotherModule("counts", replica_id="engine-0")))) is EngineFailed


def test_a_long_text_keeps_its_remedy_over_a_channel_and_is_not_shortened_again() -> None:
    error = unpacked(packed(InvalidRequest(f"field = {'x' * 10_000}: leave it out", param="field")))
    assert str(error).endswith(": leave it out")
    assert len(str(error)) <= 4000
    assert shortened(str(error)) == str(error)


def test_an_error_that_was_not_foreseen_is_named() -> None:
    assert "ZeroDivisionError" in str(unpacked(packed(ZeroDivisionError("by zero"))))
    assert not isinstance(unpacked(packed(ZeroDivisionError())), EngineUnreachable)
