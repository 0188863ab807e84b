"""The relay's receivers against a played trainer; tests/gateway/weights/test_relay.py has the whole process."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engines.errors import InvalidRequest, WeightUpdateFailed
from engines.transfer.packing import NamedTensor, packed
from engines.transfer.relay import GlooReceiver, NcclReceiver, NoModel

CPU = torch.device("cpu")


class SeenModel(NoModel):
    """Keeps copies of what was loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[NamedTensor]) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(7, 33, generator=generator)
    return {"wide": wide, "one": torch.tensor(2.5), "half": wide[0].to(torch.bfloat16)}


def announced(named: dict[str, torch.Tensor]) -> dict[str, Any]:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in named.values()]
    shapes = [list(tensor.shape) for tensor in named.values()]
    return {"names": list(named), "dtype_names": dtypes, "shapes": shapes}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def init_info(port: int = 1, **more: Any) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, **more}


def test_over_gloo_a_transfer_without_a_group_or_tensor_by_tensor_is_refused() -> None:
    receiver = GlooReceiver(NoModel())
    with pytest.raises(WeightUpdateFailed, match="no weight group"):
        receiver.receive(announced(tensors()))
    with pytest.raises(InvalidRequest, match="set packed to true"):
        receiver.join(init_info(packed=False))


class PlayedCommunicator:
    """vLLM's communicator whose other end is a trainer that has sent everything already."""

    def __init__(self, broadcasts: Iterable[torch.Tensor]) -> None:
        self._broadcasts: Iterator[torch.Tensor] = iter(broadcasts)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        tensor.copy_(next(self._broadcasts))

    def destroy(self) -> None:
        """Nothing to leave."""


class NoStream:
    def synchronize(self) -> None:
        """All is done at once."""


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's receiver computes on the CPU."""
    packed_tensor = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    for name in ("set_device", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda _, num_buffers: [NoStream()] * num_buffers)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("is_packed", [True, False])
def test_over_nccl_the_model_gets_what_vllms_own_receiver_takes(
    monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    model, sent, places = SeenModel(), tensors(), []

    def join(info: Any, place: SimpleNamespace) -> PlayedCommunicator:
        places.append(info.rank_offset + place.data_parallel_index * place.world_size + place.rank)
        return PlayedCommunicator(packed(sent.items(), 1 << 20) if is_packed else sent.values())

    monkeypatch.setattr(nccl_engine, "worker_init_process_group", join)
    receiver = NcclReceiver(model, CPU)
    receiver.join(init_info(packed=is_packed))
    receiver.receive(announced(sent))
    assert places == [1]
    assert same(model.loaded, sent)
