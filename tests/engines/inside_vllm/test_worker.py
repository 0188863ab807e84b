"""Our extension of vLLM's workers in a real vLLM server on CPU with a tied head: receipts, versions, broken updates."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch

from engines.clients.vllm_engine import VllmEngine
from engines.engine import ReceiptCopy
from engines.errors import EngineFailed, WeightUpdateFailed
from engines.store.draft import is_whole
from engines.store.manifest import check_bytes
from engines.store.weight_store import WeightStore
from engines.transfer.tensor_bytes import digest_on_host
from examples.tiny_model import task
from tests.material import plain_layers, tied_model
from tests.rigs.engines.real_trainer import PROBLEMS, announced, said_at, trl_client
from tests.rigs.engines.real_vllm import on_engine, served
from tests.rigs.waiting import wait_until
from trainer_client.trl import GlooVLLMClient

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0


@dataclass
class Broken:
    """A server, its trainer, and the weights of updates that break off."""

    url: str
    client: GlooVLLMClient
    weights: list[tuple[str, torch.Tensor]]
    cut_off: Path
    """A folder whose file of tensors ends too soon."""

    def on(self, call: Callable[[VllmEngine], Awaitable[Any]]) -> Any:
        return on_engine(self.url, call)

    def send(self, how: Callable[..., Awaitable[None]], named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Have the engine receive tensors by this method of its client."""
        assert self.client.communicator is not None
        with ThreadPoolExecutor(1) as beside:
            received = beside.submit(self.on, lambda engine: how(engine, announced(named), TIMEOUT_S))
            with suppress(WeightUpdateFailed):  # the engine's error says more
                self.client.communicator.send(iter(named))
            received.result(TIMEOUT_S)


def opened(one: Broken) -> None:
    one.on(lambda engine: engine.open_receipt(None, TIMEOUT_S))


def started(one: Broken) -> None:
    opened(one)
    one.on(lambda engine: engine.start_weight_update(TIMEOUT_S))


def half_sent(one: Broken) -> None:
    started(one)
    one.send(VllmEngine.update_weights, one.weights[::2])


def broken_in_the_middle(one: Broken) -> None:
    """vLLM then ends the session by itself."""
    half_sent(one)
    with pytest.raises(EngineFailed, match="no_such_tensor"):
        one.send(VllmEngine.update_weights, [("no_such_tensor", torch.ones(2))])
    one.client.init_communicator("cpu")


def closed(one: Broken) -> None:
    started(one)
    one.send(VllmEngine.update_weights, one.weights)
    one.on(lambda engine: engine.close_receipt(TIMEOUT_S))


def half_staged(one: Broken) -> None:
    opened(one)
    one.send(VllmEngine.stage_weights, one.weights[::2])


def swapped_in(one: Broken) -> None:
    opened(one)
    one.send(VllmEngine.stage_weights, one.weights)
    one.on(lambda engine: engine.close_receipt(TIMEOUT_S))
    one.on(lambda engine: engine.start_weight_update(TIMEOUT_S))
    one.on(lambda engine: engine.load_staged(TIMEOUT_S))


def half_loaded(one: Broken) -> None:
    with pytest.raises(EngineFailed):
        one.on(lambda engine: engine.load_snapshot(str(one.cut_off), 1, TIMEOUT_S))


ENDS = (opened, started, half_sent, broken_in_the_middle, closed, half_staged, swapped_in, half_loaded)


@pytest.mark.parametrize("in_place", [True, False])
def test_however_an_update_ended_a_version_is_loaded_over_it_and_the_next_one_loads_all(
    in_place: bool, tmp_path: Path
) -> None:
    first, _, other = (tied_model.save(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3))
    first_says, second_says = (task.greedy_token_ids(str(tmp_path / name), PROBLEMS) for name in ("1", "2"))
    with (tmp_path / "3" / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    env = plain_layers.environ(tmp_path) if in_place else {}
    with served(tmp_path / "1", tmp_path, env=env) as url, trl_client(url) as client:
        one = Broken(url, client, list(other.named_parameters()), tmp_path / "3")
        obstacle = one.on(lambda engine: engine.prepare_updates((), "", (), TIMEOUT_S)).obstacle
        assert in_place == (not obstacle)
        for end in ENDS:
            end(one)  # and the gateway has died
            one.on(lambda engine: engine.load_snapshot(str(tmp_path / "2"), 1, TIMEOUT_S))
            assert said_at(url) == second_says, end
            end(one)
            one.on(lambda engine: engine.abandon_weight_update(TIMEOUT_S))
            opened(one)
            client.update_model_params(first)
            one.on(lambda engine: engine.close_receipt(TIMEOUT_S))
            assert said_at(url) == first_says, end


def test_a_version_is_copied_as_it_arrives_and_loaded_again(tmp_path: Path) -> None:
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

        with pytest.raises(EngineFailed):
            load(tmp_path / "nowhere", 2)
        assert not on_engine(url, lambda engine: engine.weight_label(TIMEOUT_S)).held
        load(tmp_path / "first", 0)
        assert said_at(url) == first_says
