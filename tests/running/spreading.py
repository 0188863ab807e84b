"""How pytest-xdist spreads the tests: a file goes to one process, all that load vLLM to the same, a slow one to all."""

from typing import Any

import pytest

_LOAD_VLLM = (
    "tests/engines/transfer/test_gloo.py",
    "tests/engines/process/test_launch.py",
    "tests/engines/transfer/test_relay.py",
    "tests/engines/inside_vllm/test_in_place.py",
    "tests/engines/inside_vllm/test_plugin.py",
    "tests/examples/test_tiny_model.py",  # transformers alone, which vLLM loads too
    "tests/gateway/http/test_openai_client.py",  # OpenAI's client alone, which vLLM loads too
    "tests/trainer_client/transports/test_tensors.py",  # transformers
    "tests/trainer_client/test_trl.py",
)
"""Loading it takes ten seconds of CPU, once for each process."""
_WAIT = ("tests/gateway/dialects/resumption/test_tokens.py",)
"""Its tests mostly wait, and share nothing: one process alone would be at them long after the others have ended."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # verl's environment has none

    class Spreading(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            if file in _WAIT:
                return nodeid
            return "vllm" if file in _LOAD_VLLM else file

    return Spreading(config, log)
