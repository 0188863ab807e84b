"""vLLM's packed transfer takes the streams of the update before, on a release that would take new ones."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
packed_tensor = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")

import torch

from engines.transfer.packed_streams import keep_streams


class PlayedStream:
    def __init__(self, device: int) -> None:
        self.device = device


@pytest.fixture
def of_026(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module of vLLM 0.26, on a machine with GPUs of which 1 is used."""
    played = SimpleNamespace(torch=torch)
    monkeypatch.setattr("vllm.distributed.weight_transfer.packed_tensor", played)
    monkeypatch.setattr(torch.cuda, "Stream", PlayedStream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return played


def streams(module: SimpleNamespace) -> list[PlayedStream]:
    """As its transfer takes them."""
    return [module.torch.cuda.Stream() for _ in range(2)]


def test_the_next_update_has_the_same_two_streams(of_026: SimpleNamespace) -> None:
    keep_streams()
    first, second = streams(of_026)
    assert first is not second
    assert streams(of_026) == [first, second]
    assert {first.device, second.device} == {1}


def test_each_gpu_has_its_own(of_026: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_streams()
    one = streams(of_026)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    other = streams(of_026)
    assert {stream.device for stream in other} == {0}
    monkeypatch.undo()
    assert not set(one) & set(other)


def test_all_else_is_torchs(of_026: SimpleNamespace) -> None:
    keep_streams()
    assert of_026.torch.uint8 is torch.uint8
    assert of_026.torch.cuda.synchronize is torch.cuda.synchronize
    with pytest.raises(AttributeError):
        _ = of_026.torch.nothing


def test_it_is_mended_once(of_026: SimpleNamespace) -> None:
    keep_streams()
    mended, taken = of_026.torch, streams(of_026)
    keep_streams()
    assert of_026.torch is mended
    assert streams(of_026) == taken


def test_a_release_that_keeps_its_streams_is_left_alone(of_026: SimpleNamespace) -> None:
    of_026._get_streams = lambda *_: ()
    keep_streams()
    assert of_026.torch is torch


def test_the_release_that_is_installed_is_one_or_the_other() -> None:
    """Else neither its own streams nor ours would be found."""
    assert hasattr(packed_tensor, "_get_streams") or isinstance(packed_tensor.torch.cuda.Stream, type)
