"""What is told when a real vLLM on CPU does not come up. The configuration is wrong on purpose, past our own checks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engines.config import EngineConfig
from engines.errors import EngineStartFailed
from engines.server import EngineServer
from examples.tiny_model.train import COMMITTED
from tests.real_vllm import engine_config

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("levers", "told"),
    [
        (
            {"model": "/nowhere/model"},
            "there is no folder /nowhere/model on the engine's node; the engine says: ",
        ),
        (
            {"tensor_parallel_size": 3},
            "3 GPUs cannot share the model's 4 attention heads evenly; the engine says: "
            '"Total number of attention heads (4) must be divisible by tensor parallel size (3)."; '
            "set engine.tensor_parallel_size to a divisor of 4",
        ),
        (
            {"dtype": "float17"},
            'the engine does not take what it is given for --dtype; the engine says: "argument --dtype: invalid choice',
        ),
        (
            {"kv_cache_memory_bytes": 1 << 20},
            "the KV cache is too small for one sequence of 512 tokens; ",
        ),
    ],
    ids=["missing model", "tensor parallel size", "dtype", "KV cache"],
)
def test_a_failure_is_one_line_with_the_lever_and_then_the_log(
    levers: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = EngineConfig.model_validate(engine_config(COMMITTED, tmp_path).model_dump() | levers)
    with pytest.raises(EngineStartFailed) as failed:
        asyncio.run(EngineServer(config, replica_id="engine-0", group="engine", index=0).start())
    first, second, *rest = str(failed.value).splitlines()
    assert first.startswith(f"replica engine-0: {told}")
    assert f"engine.{next(iter(levers))}" in first
    (log,) = tmp_path.iterdir()  # and no second start
    assert second == f"    log {log} ends with:"
    assert rest
    assert all(line.startswith("    | ") for line in rest)
