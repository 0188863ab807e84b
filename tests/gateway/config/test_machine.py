"""Reasons why a right configuration cannot run on one machine."""

from pathlib import Path
from typing import Any

import pytest

from gateway.config.machine import lacks
from gateway.config.schema import Config


def found(tmp_path: Path, gpus: int = 0, environ: dict[str, str] | None = None, **tree: Any) -> list[str]:
    for index in range(gpus):
        (tmp_path / f"nvidia{index}").touch()
    return lacks(Config.model_validate(tree), environ=environ or {}, devices=tmp_path)


def test_a_gpu_configuration_without_a_gpu(tmp_path: Path) -> None:
    engine = {"kind": "sglang", "model": "org/model", "tensor_parallel_size": 2}
    (lack,) = found(tmp_path, engine=engine)
    assert lack.startswith("engine: a replica takes 2 GPUs")
    assert lack.endswith("This machine has no GPU")
    here = found(tmp_path, gpus=2, engine=engine) + found(tmp_path, engine=engine, serve={"nodes_may_join": True})
    assert [line for line in here if "GPU" in line] == []


def test_a_batch_system_s_share_of_the_gpus_counts(tmp_path: Path) -> None:
    engine = {"kind": "sglang", "model": "org/model", "num_replicas": 2}
    (lack,) = found(tmp_path, gpus=8, environ={"CUDA_VISIBLE_DEVICES": "3"}, engine=engine)
    assert "the replicas take 2 GPUs" in lack


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", "engine.model is missing: give a file with it, -c FILE, or a folder or Hugging Face id"),
        ("/nowhere/model", "engine.model = '/nowhere/model': this machine has no such folder"),
    ],
)
def test_a_model_that_is_not_there(tmp_path: Path, model: str, words: str) -> None:
    assert found(tmp_path, gpus=1, engine={"kind": "sglang", "model": model}) == [words]


def test_an_engine_that_is_not_installed(tmp_path: Path) -> None:
    engine = {"kind": "sglang", "model": "org/model", "python": "/nowhere/python"}
    (lack,) = found(tmp_path, gpus=1, engine=engine)
    assert "engine.python = '/nowhere/python' cannot be run" in lack


def test_a_log_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """At `up` over a running fleet its engines would not start again."""
    (tmp_path / "file").touch()
    tree: dict[str, Any] = {"engine": {"kind": "sim", "log_dir": str(tmp_path / "file" / "log")}}
    (lack,) = found(tmp_path, **tree)
    assert lack.startswith(f"engine.log_dir = '{tmp_path}/file/log'")
    tree["engine"]["log_dir"] = str(tmp_path / "log")
    assert found(tmp_path, **tree) == []


def test_a_server_that_another_starts_needs_nothing_of_this_machine(tmp_path: Path) -> None:
    assert found(tmp_path, engine={"kind": "external", "url": "http://127.0.0.1:1"}) == []


def test_a_model_that_only_other_nodes_fetch_is_not_asked_for(tmp_path: Path) -> None:
    engine = {"kind": "vllm", "model": "org/model", "env": {"HF_ENDPOINT": "http://127.0.0.1:9"}}
    (lack,) = found(tmp_path, engine=engine)
    assert lack.startswith(
        "engine.model = 'org/model' is not in the Hugging Face cache, and the hub does not give it: "
    )
    assert found(tmp_path, engine=engine, serve={"nodes_may_join": True}) == []
