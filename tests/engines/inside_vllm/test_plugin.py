"""Our vLLM plugin and the backend it registers, with a played worker. Real servers: `test_worker.py`."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

from engines.inside_vllm.plugin import METHOD, register

if TYPE_CHECKING:
    from engines.inside_vllm.gloo_receiver import GlooWeightTransferEngine


def played_engine(rank: int = 0, data_parallel_index: int = 0, world_size: int = 1) -> "GlooWeightTransferEngine":
    pytest.importorskip("vllm")
    from engines.inside_vllm.gloo_receiver import GlooWeightTransferEngine

    parallel = SimpleNamespace(rank=rank, data_parallel_index=data_parallel_index, world_size=world_size)
    vllm_config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace())
    return GlooWeightTransferEngine(SimpleNamespace(), vllm_config, torch.device("cpu"), torch.nn.Module())


def test_each_process_of_vllm_asks_for_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_real_canary.py` has an engine that needs it, on a CPU that has it."""
    pytest.importorskip("vllm")
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    register()
    assert asked


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": False}, "packed"),
        ({"master_address": None, "master_port": None, "nccl_unique_id_b64": "QUFB" * 42 + "QUE="}, "master_address"),
    ],
)
def test_an_init_that_gloo_cannot_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    engine = played_engine()
    sent_by_trl = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}
    with pytest.raises(ValueError, match=message):
        engine.init_transfer_engine(engine.parse_init_info(sent_by_trl | changes))


def test_vllm_forks_all_its_processes_where_it_is_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    utils, of_the_core = pytest.importorskip("vllm.v1.utils"), pytest.importorskip("vllm.v1.engine.utils")
    monkeypatch.setattr(utils, "multiprocessing", utils.multiprocessing)
    monkeypatch.setattr(of_the_core, "get_mp_context", of_the_core.get_mp_context)
    monkeypatch.setenv(METHOD, "fork")
    register()
    monkeypatch.setenv(METHOD, "spawn")  # as vLLM does on CPU
    assert utils.multiprocessing.get_context("spawn").get_start_method() == "fork"
    assert of_the_core.get_mp_context().get_start_method() == "fork"


def test_ranks_are_unique_over_data_parallel_groups() -> None:
    ranks = [played_engine(rank, dp, world_size=2)._rank(1) for dp in range(2) for rank in range(2)]
    assert ranks == [1, 2, 3, 4]
