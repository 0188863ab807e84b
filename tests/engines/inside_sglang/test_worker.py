"""The part of a worker, with a small model of torch's in the place of SGLang's, and a trainer over gloo."""

import json
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engines.errors import WeightUpdateFailed
from engines.inside_sglang import worker
from engines.inside_sglang.worker import WeightWorker
from engines.process.port import free_port
from engines.transfer.gloo import SENDER_RANK, WeightGroup

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


TIMEOUT_S = 30.0


class Model(torch.nn.Module):  # type: ignore[name-defined]
    """Two parameters of the checkpoint in one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            self.both.data.narrow(0, {"up": 0, "down": 2}[name], 2).copy_(tensor)


def manager_of(model: Any, **settings: Any) -> Any:
    server_args = SimpleNamespace(pp_size=1, dp_size=1, **settings)
    runner = SimpleNamespace(
        model=model,
        server_args=server_args,
        model_config=SimpleNamespace(quantization=None),
        weight_updater=SimpleNamespace(tp_rank=0),
    )
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), draft_worker=None)


@pytest.fixture(autouse=True)
def unquant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that are looked for in SGLang's layers."""
    found: Any = ModuleType("sglang.srt.layers.quantization.unquant")
    for name in ("UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"):
        setattr(found, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, found.__name__, found)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def own(model: Model) -> WeightWorker:
    return WeightWorker(manager_of(model))


@dataclass
class Trainer:
    """The sending end, on a thread of its own."""

    group: WeightGroup
    port: int

    def join(self) -> threading.Thread:
        return self._run(self.group.join)

    def send(self, tensors: dict[str, Any]) -> threading.Thread:
        return self._run(lambda: self.group.send(iter(tensors.items())))

    def _run(self, work: Any) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def trainer(own: WeightWorker) -> Iterator[Trainer]:
    port = free_port()
    found = Trainer(WeightGroup("127.0.0.1", port, SENDER_RANK, 2, TIMEOUT_S), port)
    joining = found.join()
    own.open_group("127.0.0.1", port, 1, 2, TIMEOUT_S)
    joining.join(TIMEOUT_S)
    yield found
    own.close_group()
    found.group.close()


def tensors(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(2, 3, generator=generator) for name in ("up", "down")}


def info(*names: str) -> dict[str, Any]:
    return {"names": list(names), "dtype_names": ["float32"] * len(names), "shapes": [[2, 3]] * len(names)}


def test_a_name_of_a_hub_is_left_to_sglang_and_a_missing_version_is_an_error(own: WeightWorker) -> None:
    assert not own.load_snapshot("org/model", 0)
    with pytest.raises(FileNotFoundError, match=r"weights\.store name a folder"):
        own.load_snapshot("/nowhere/v3", 3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pp_size": 2}, "pipeline or data parallelism"),
        ({"dp_size": 2}, "pipeline or data parallelism"),
        ({"enable_lora": True}, "enable_lora"),
        ({"weight_cache_mode": "client"}, "weight_cache_mode"),
    ],
)
def test_what_it_cannot_update_is_refused_with_the_reason(
    model: Model, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    manager = manager_of(model)
    vars(manager.tp_worker.model_runner.server_args).update(settings)
    own = WeightWorker(manager)
    assert reason in own.plan_updates([])["obstacle"]
    with pytest.raises(WeightUpdateFailed, match=reason):
        own.open_group("127.0.0.1", 1, 1, 2, TIMEOUT_S)
    assert not own.load_snapshot(str(tmp_path), 1), "SGLang's own route loads it"


def speculating(model: Any, algorithm: str, *drafts: Any) -> Any:
    """A worker with a draft of another method, or of so many models."""
    manager = manager_of(model, speculative_algorithm=algorithm)
    runners = [("draft", SimpleNamespace(model=draft)) for draft in drafts]
    manager.draft_worker = SimpleNamespace(weight_update_runners=lambda: runners)
    return manager


def test_an_update_leaves_a_draft(model: Model, tmp_path: Path) -> None:
    draft = Model()
    own = WeightWorker(speculating(model, "STANDALONE", draft))
    assert own.target.obstacle == ""
    safetensors_torch.save_file({"up": torch.ones(2, 3), "down": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert own.load_snapshot(str(tmp_path), 1)
    assert (model.both == 1).all()
    assert (draft.both == 0).all()
    assert "DSPARK" in WeightWorker(speculating(model, "DSPARK", draft)).target.obstacle


def test_a_model_with_derived_tensors_is_refused(model: Model) -> None:
    deriving: Any = Model()
    deriving.post_load_weights = lambda: None
    assert "derives tensors" in WeightWorker(manager_of(deriving)).target.obstacle
    quantized = manager_of(model)
    quantized.tp_worker.model_runner.model_config.quantization = "fp8"
    assert "quantization fp8" in WeightWorker(quantized).target.obstacle


def test_answers_and_errors_are_those_of_all_workers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(**fields: Any) -> Any:
        return SimpleNamespace(**fields)

    structs: Any = ModuleType("sglang.srt.managers.io_struct")
    structs.CheckWeightsReqOutput = reply
    monkeypatch.setitem(sys.modules, structs.__name__, structs)
    monkeypatch.setattr(worker, "_workers", [])
    others: list[dict[str, Any]] = [{"answer": {"obstacle": "sideways"}}]
    monkeypatch.setattr(worker, "_gathered", lambda own, group: [own, *others])
    manager = manager_of(model)
    manager.tp_cpu_group = None
    intervals: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    told = worker.answer(manager, "plan_updates", {})
    assert intervals == [1e-4], "SGLang's idle scheduler spins"
    assert (told.success, [one["obstacle"] for one in json.loads(told.message)]) == (True, ["", "sideways"])
    others[:] = [{"error": "RuntimeError: no memory"}]
    told = worker.answer(manager, "load_snapshot", {"path": "/nowhere", "version": 1})
    assert not told.success
    assert "worker 0: FileNotFoundError" in told.message
    assert "worker 1: RuntimeError: no memory" in told.message


def test_a_wipe_overwrites_the_kv_of_all_pools_and_no_table(own: WeightWorker) -> None:
    def kv() -> list[Any]:
        return [torch.full((2, 3), float("nan")), torch.full((2, 3), float("nan"))]

    tables = torch.ones(2, dtype=torch.int64)
    inner = SimpleNamespace(k_buffer=kv(), v_buffer=kv(), data_ptrs=tables)
    pool = SimpleNamespace(kv_buffer=kv(), k_buffer=None, full_kv_pool=inner, swa_kv_pool=None, data_ptrs=tables)
    unmapped = SimpleNamespace(kv_buffer=kv(), post_capture_active=True)
    for own._runner.token_to_kv_pool in (pool, unmapped):
        own.wipe_kv()
    assert not any(tensor.any() for tensor in (*pool.kv_buffer, *inner.k_buffer, *inner.v_buffer))
    assert all(tensor.isnan().all() for tensor in unmapped.kv_buffer)
    assert tables.all()


def test_a_dropped_update_leaves_its_trainer(own: WeightWorker, model: Model, trainer: Trainer) -> None:
    own.open_receipt()
    own.stage_weights(info("up", "down"), TIMEOUT_S)
    own.drop_receipt()
    with pytest.raises(WeightUpdateFailed, match="the update was dropped"):
        list(map(trainer.group.broadcast, [torch.zeros(48, dtype=torch.uint8)] * 2))
    assert not model.both.any()


def test_a_wipe_forgets_what_the_weights_made_of_images(own: WeightWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    encodings = {7: "of refused weights"}
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.mm_schedule", SimpleNamespace(embedding_cache=encodings))
    own._runner.token_to_kv_pool = SimpleNamespace(k_buffer=[torch.ones(2)])
    own.wipe_kv()
    assert not encodings
