"""Features that an engine lacks, with the reason: the only table. A check of a lack asserts how the engine shows it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engines.types import EngineKind
from tests.engines.conformance.subject import Subject


@dataclass(frozen=True, slots=True)
class Lack:
    """`what` is missing in engines for which `applies`."""

    what: str
    applies: Callable[[Subject], bool]
    reason: str


def _is(kind: EngineKind) -> Callable[[Subject], bool]:
    return lambda subject: subject.kind is kind


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _vllm_without(route: str) -> Callable[[Subject], bool]:
    return lambda subject: subject.kind is EngineKind.VLLM and route not in subject.info.capabilities


LACKS = (
    Lack("grammar", _is(EngineKind.SIM), "its tokens are made up and follow no grammar; it refuses structured_outputs"),
    Lack(
        "seed",
        lambda subject: (
            subject.kind is EngineKind.SGLANG and not subject.config.extra.get("enable_deterministic_inference")
        ),
        "it draws by seed only when started with enable_deterministic_inference",
    ),
    Lack(
        "stop_token_ids with ignore_eos",
        _is(EngineKind.SGLANG),
        "with ignore_eos it looks at no stop token; both together are refused",
    ),
    Lack(
        "spans",
        lambda subject: subject.kind is EngineKind.VLLM and _numbers(subject.info.engine_version) < (0, 32),
        "its completions tell no weight versions; the gateway makes spans of what it knows of updates",
    ),
    Lack(
        "unknown tensors",
        _is(EngineKind.SGLANG),
        "its loaders pass over a tensor that the model does not have; the gateway refuses it before the update",
    ),
    Lack(
        "close_group",
        _vllm_without("/shutdown_weight_transfer_engine"),
        "this version has no /shutdown_weight_transfer_engine; a trainer that comes opens a group of its own",
    ),
)


def lack_of(what: str, subject: Subject) -> Lack | None:
    """The declared lack, if there is one."""
    assert any(lack.what == what for lack in LACKS), f"nobody lacks {what!r}"
    return next((lack for lack in LACKS if lack.what == what and lack.applies(subject)), None)


def declared(lack: Lack) -> None:
    """Called once the lack has been seen: ends the check, and shows in the matrix."""
    pytest.skip(f"no: {lack.reason}")


def not_run(reason: str) -> None:
    """Ends a check for which something is missing around the engine."""
    pytest.skip(f"not run: {reason}")
