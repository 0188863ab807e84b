"""Reports of a real engine on CPU that does not start, with a wrong configuration that passes our own checks."""

import asyncio
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.errors import EngineStartFailed
from engines.process import engine_server as server
from engines.process.engine_server import EngineServer
from engines.process.port import free_port
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines import real_sglang, real_vllm


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("levers", "told"),
    [
        (
            {"model": "/nowhere/model"},
            "there is no folder /nowhere/model on the engine's node; the engine says: ",
        ),
        (
            {"tensor_parallel_size": 3},
            "the model's attention heads cannot be split evenly over the GPUs of a replica; the engine says: "
            '"Total number of attention heads (4) must be divisible by tensor parallel size (3)."; '
            "set engine.tensor_parallel_size to a divisor of",
        ),
        (
            {"kv_cache_dtype": "fp17"},
            'the engine does not accept the value of --kv-cache-dtype; the engine says: "argument',
        ),
        (
            {"kv_cache_memory_bytes": 1 << 20},
            "the KV cache is too small for one sequence of 512 tokens; 128 fit; the engine says: ",
        ),
    ],
    ids=["missing model", "tensor parallel size", "kv_cache_dtype", "KV cache"],
)
def test_a_failure_of_vllm_is_one_line_with_the_lever_and_then_the_log(
    levers: dict[str, Any], told: str, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    wrong = EngineConfig.model_validate(real_vllm.engine_config(COMMITTED, tmp_path).model_dump() | levers)
    first = _first_line_of_failure(wrong)
    assert first.startswith(f"replica engine-0: {told}")
    assert f"engine.{next(iter(levers))}" in first
    assert len(list(tmp_path.iterdir())) == 1, "it was started a second time"


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("levers", "told"),
    [
        (
            {"kv_cache_dtype": "fp17"},
            'the engine does not accept the value of --kv-cache-dtype; the engine says: "argument',
        ),
        (
            {"max_model_len": 100_000},
            "100000 tokens are more than the model's own limit of 512; the engine says: ",
        ),
        pytest.param({"model": "BARE"}, "BARE has no weights; the engine says: ", marks=pytest.mark.slow),
    ],
    ids=["kv_cache_dtype", "max_model_len", "missing weights"],
)
def test_a_failure_of_sglang_is_one_line_with_the_lever_and_then_the_log(
    levers: dict[str, Any], told: str, tmp_path: Path
) -> None:
    bare, logs = tmp_path / "bare", tmp_path / "logs"
    shutil.copytree(COMMITTED, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    levers = {key: str(bare) if value == "BARE" else value for key, value in levers.items()}
    right = real_sglang.engine_config(COMMITTED, logs)
    first = _first_line_of_failure(EngineConfig.model_validate(right.model_dump() | levers))
    assert first.startswith(f"replica engine-0: {told.replace('BARE', str(bare))}")
    assert f"engine.{next(iter(levers))}" in first
    assert len(list(logs.iterdir())) == 1, "it was started a second time"


@pytest.mark.slow
@pytest.mark.sglang
def test_an_sglang_that_loses_its_port_while_it_loads_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        ports = iter([somebody.getsockname()[1], free_port()])
        monkeypatch.setattr(server, "HeldPort", lambda: SimpleNamespace(number=next(ports), release=lambda: None))
        url = asyncio.run(_url_once_started(real_sglang.engine_config(COMMITTED, tmp_path)))
        assert len(list(tmp_path.iterdir())) == 2
        assert url != f"http://127.0.0.1:{somebody.getsockname()[1]}"


async def _url_once_started(config: EngineConfig) -> str:
    engine = EngineServer(config, replica_id="engine-0", group="engine", index=0)
    try:
        return (await engine.start()).url
    finally:
        await engine.stop()


def _first_line_of_failure(wrong: EngineConfig) -> str:
    with pytest.raises(EngineStartFailed) as failed:
        asyncio.run(EngineServer(wrong, replica_id="engine-0", group="engine", index=0).start())
    first, second, *rest = str(failed.value).splitlines()
    assert second.startswith(f"    log {wrong.log_dir}/")
    assert rest
    assert all(line.startswith("    | ") for line in rest)
    return first
