"""Why vLLM is changed, and its pause; `tests/gateway/weights/test_real_pause.py` has the spans of a real one."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from engines.inside_vllm.spans import pause_at_once


def test_the_installed_vllm_tells_no_versions_by_itself_in_openais_dialects_nor_before_a_request_ends() -> None:
    """Where this fails, `report_spans` or `count_so_far` may go."""
    completions = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    chats = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    requests = pytest.importorskip("vllm.v1.engine.output_processor")
    choices = [
        getattr(where, f"{name}Response{kind}Choice")
        for where, name in ((completions, "Completion"), (chats, "ChatCompletion"))
        for kind in ("", "Stream")
    ]
    assert not any("weight_versions" in choice.model_fields for choice in choices)
    made = inspect.getsource(requests.RequestState._new_completion_output)
    assert "weight_versions=self._weight_version_spans() if finished else None" in made


async def test_a_pause_that_keeps_requests_and_their_kv_ends_with_the_last_step() -> None:
    calls: list[Any] = []

    class Servers:
        def __init__(self) -> None:
            self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause_core)

        async def pause_core(self, **asked: Any) -> None:
            calls.append(("core", asked))

        async def pause_generation(self, **asked: Any) -> None:
            calls.append(("as ever", asked))

    pause_at_once(Servers)
    asked = [
        {"mode": "keep", "clear_cache": False}, {"mode": "keep", "clear_cache": True},
        {"mode": "abort", "clear_cache": False},
    ]  # fmt: skip
    for one in asked:
        await Servers().pause_generation(**one)
    assert calls == list(zip(("core", "as ever", "as ever"), asked, strict=True))
