"""Our vLLM plugin and the backend it registers: with a played worker, and in a real vLLM server on CPU."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

from engines.errors import WeightUpdateFailed
from engines.inside_vllm.plugin import SHARED_ADAPTERS, register
from engines.process.port import free_port
from engines.transfer.gloo import WeightGroup, send
from tests.rigs.engines.real_vllm import greedy_token_ids, served

if TYPE_CHECKING:
    from engines.inside_vllm.gloo_receiver import GlooWeightTransferEngine

TIMEOUT_S = 90.0
SOON_S = 30.0


class PlayedModel(torch.nn.Module):
    """Takes weights as vLLM's models do: any tensor it knows by name."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "unknown":
                raise KeyError(name)
            self.loaded[name] = tensor


def played_engine(rank: int = 0, data_parallel_index: int = 0, world_size: int = 1) -> "GlooWeightTransferEngine":
    pytest.importorskip("vllm")
    from engines.inside_vllm.gloo_receiver import GlooWeightTransferEngine

    parallel = SimpleNamespace(rank=rank, data_parallel_index=data_parallel_index, world_size=world_size)
    vllm_config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace())
    return GlooWeightTransferEngine(SimpleNamespace(), vllm_config, torch.device("cpu"), PlayedModel())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=4) as executor:
        yield executor


def init_info(port: int, **changes: Any) -> dict[str, Any]:
    sent_by_trl = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "packed": True,
    }
    return {**sent_by_trl, **changes}


def update(engine: "GlooWeightTransferEngine", tensors: dict[str, torch.Tensor]) -> None:
    """As the worker's `update_weights` does, less the wait for an accelerator."""
    update_info = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    engine.receive_weights(engine.parse_update_info(update_info))


def trainer_and_engine(pool: ThreadPoolExecutor) -> "tuple[WeightGroup, GlooWeightTransferEngine]":
    port = free_port()
    trainer, engine = WeightGroup("127.0.0.1", port, 0, 2, TIMEOUT_S), played_engine()
    joining = pool.submit(trainer.join)
    engine.init_transfer_engine(engine.parse_init_info(init_info(port)))
    joining.result(timeout=SOON_S)
    return trainer, engine


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


def test_the_engine_loads_what_the_trainer_sends(pool: ThreadPoolExecutor) -> None:
    trainer, engine = trainer_and_engine(pool)
    tensors = {"embed": torch.randn(4, 3), "norm": torch.ones(3, dtype=torch.bfloat16)}
    sending = pool.submit(send, iter(tensors.items()), trainer)
    update(engine, tensors)
    sending.result(timeout=SOON_S)
    assert engine.model.loaded.keys() == tensors.keys()
    assert all(torch.equal(engine.model.loaded[name], tensor) for name, tensor in tensors.items())
    engine.shutdown()
    trainer.close()


def test_a_tensor_that_the_model_does_not_know_fails_both_ends(pool: ThreadPoolExecutor) -> None:
    trainer, engine = trainer_and_engine(pool)
    tensors = {"unknown": torch.ones(2)}
    pool.submit(send, iter(tensors.items()), trainer)
    with pytest.raises(KeyError):
        update(engine, tensors)
    with pytest.raises(WeightUpdateFailed, match="rank 1: KeyError: 'unknown'"):
        trainer.broadcast(torch.ones(1))


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


def test_ranks_are_unique_over_data_parallel_groups() -> None:
    ranks = [played_engine(rank, dp, world_size=2)._rank(1) for dp in range(2) for rank in range(2)]
    assert ranks == [1, 2, 3, 4]


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


def test_vllm_finds_the_plugin() -> None:
    from importlib.metadata import entry_points

    found = {entry.name: entry.load() for entry in entry_points(group="vllm.general_plugins")}
    assert found["rollout_gateway"] is register


def test_a_tied_head_alone_is_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing takes long, and vLLM has packed what it loaded."""
    layers = pytest.importorskip("vllm.model_executor.layers.utils")
    embedding = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
    from engines.inside_vllm import gloo_receiver as vllm_gloo

    def layer(kind: Any, weight: torch.nn.Parameter) -> torch.nn.Module:
        made: torch.nn.Module = kind.__new__(kind)
        torch.nn.Module.__init__(made)
        made.weight, made.cpu_linear = weight, len
        return made

    def model(head: torch.nn.Parameter) -> torch.nn.Module:
        layers = {
            "embed_tokens": layer(embedding.VocabParallelEmbedding, shared),
            "lm_head": layer(embedding.ParallelLMHead, head),
        }
        return torch.nn.ModuleDict(layers)

    shared, own = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4, 2))
    packed: list[torch.nn.Module] = []
    monkeypatch.setattr(layers, "dispatch_cpu_unquantized_gemm", lambda one, remove_weight: packed.append(one))
    monkeypatch.setattr(vllm_gloo, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    vllm_gloo.rebuild_tied_head(model(own))
    assert packed == []
    tied = model(shared)
    vllm_gloo.rebuild_tied_head(tied)
    assert packed == [tied.get_submodule("lm_head")]


@pytest.mark.vllm
def test_a_real_engine_with_a_tied_head_serves_new_weights_and_survives_a_bad_update(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    vllm_client = pytest.importorskip("trl.generation.vllm_client")
    from transformers import AutoTokenizer

    from examples.tiny_model import task
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
