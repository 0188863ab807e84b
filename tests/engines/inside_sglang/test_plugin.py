"""Calls of the gateway in SGLang's `/weights_checker`, and SGLang's own."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from engines.inside_sglang import plugin, worker
from engines.transfer.worker_calls import call_text


def test_a_call_of_ours_is_answered_and_any_other_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "answer", lambda manager, method, arguments: (manager, method, arguments))

    def sglangs(manager: Any, request: Any) -> Any:
        return "SGLang", manager, request.action

    def ask(action: str) -> Any:
        return plugin.check_weights(sglangs, "manager", SimpleNamespace(action=action))

    assert ask(call_text("close_group", {})) == ("manager", "close_group", {})
    assert ask("checksum") == ("SGLang", "manager", "checksum")
