"""Our extension of vLLM's workers in a real vLLM server on CPU: receipts, snapshots, and a model with a tied head."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch

from engines.engine import ReceiptCopy
from engines.errors import EngineFailed
from engines.store.draft import is_whole
from engines.store.manifest import check_bytes
from engines.store.weight_store import WeightStore
from engines.transfer.tensor_bytes import digest_on_host
from examples.tiny_model import task
from tests.material import tied_model
from tests.rigs.engines.real_trainer import PROBLEMS, said_at, trl_client
from tests.rigs.engines.real_vllm import on_engine, served
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0


def test_a_version_is_copied_as_it_arrives_and_loads_over_an_update_that_broke_off(tmp_path: Path) -> None:
    tied_model.save(tmp_path / "first", seed=1)
    second = tied_model.save(tmp_path / "second", seed=2)
    first_says, second_says = (task.greedy_token_ids(str(tmp_path / name), PROBLEMS) for name in ("first", "second"))
    assert first_says != second_says
    names = tuple(name for name, _ in second.named_parameters())
    store = WeightStore(tmp_path / "store")

    with served(tmp_path / "first", tmp_path) as url, trl_client(url) as client:

        def load(path: Path, version: int) -> None:
            on_engine(url, lambda engine: engine.load_snapshot(str(path), version, TIMEOUT_S))
            assert not on_engine(url, lambda engine: engine.weight_label(TIMEOUT_S)).held
            on_engine(url, lambda engine: engine.label_weights(str(version), TIMEOUT_S, is_committed=True))
            assert on_engine(url, lambda engine: engine.weight_label(TIMEOUT_S)).held == str(version)

        draft = store.draft()
        copy = ReceiptCopy(draft=str(draft), model="m", base=str(tmp_path / "first"), names=names, wait_s=5.0)
        on_engine(url, lambda engine: engine.open_receipt(copy, TIMEOUT_S))
        client.update_model_params(second)
        digests = on_engine(url, lambda engine: engine.close_receipt(TIMEOUT_S))
        assert digests == {name: digest_on_host(tensor) for name, tensor in second.named_parameters()}
        on_engine(url, lambda engine: engine.keep_receipt(TIMEOUT_S))
        wait_until(lambda: is_whole(draft), TIMEOUT_S)
        version_1 = store.promote(draft, "1", tmp_path / "first")
        assert {name: tensor.digest for name, tensor in check_bytes(version_1).tensors.items()} == digests
        assert said_at(url) == second_says

        load(tmp_path / "first", 0)
        assert said_at(url) == first_says
        load(version_1, 1)
        assert said_at(url) == second_says

        with pytest.raises(Exception, match="no_such_tensor"):
            client.update_named_param("no_such_tensor", torch.ones(2))
        load(version_1, 1)
        assert said_at(url) == second_says

        on_engine(url, lambda engine: engine.start_weight_update(TIMEOUT_S))
        assert not on_engine(url, lambda engine: engine.weight_label(TIMEOUT_S)).held
        load(version_1, 1)
        assert said_at(url) == second_says

        with pytest.raises(EngineFailed):
            load(tmp_path / "nowhere", 2)
        assert not on_engine(url, lambda engine: engine.weight_label(TIMEOUT_S)).held
        load(tmp_path / "first", 0)
        assert said_at(url) == first_says
