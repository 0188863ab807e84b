"""Which models are loaded where their weights lie, and vLLM's worker after an update, however that ended."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file
from torch.nn import Module, Parameter

from engines.inside_vllm import in_place as vllm_in_place
from engines.inside_vllm.in_place import obstacle
from engines.inside_vllm.worker import WeightWorker
from tests.rigs.waiting import wait_until

Tensors = dict[str, torch.Tensor]

SOON_S = 30.0

METHODS = {"start_weight_update", "finish_weight_update"}


class PlayedModel(Module):
    """Loads by name, as vLLM's models do."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)
            loaded.add(name)
        return loaded


def held(*shape: int) -> Parameter:
    return Parameter(torch.zeros(shape), requires_grad=False)


def layer(method: Any = None) -> Module:
    """Two tensors, so that a reload may have one of them and wait for the other."""
    made = Module()
    made.weight, made.scale = held(2, 3), held(3)
    if method is not None:
        made.quant_method = method
    return made


def attention(impl: type) -> Module:
    from vllm.model_executor.layers.attention import Attention

    made = Attention.__new__(Attention)
    Module.__init__(made)
    made.impl = object.__new__(impl)
    return made


def packed() -> Module:
    """As vLLM's layers on CPU: it computes with what it has made of its tensors."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Packing(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: Module) -> None:
            layer.packed = -torch.cat([layer.weight.data, layer.scale.data[None]])

    return layer(Packing())


def model(*layers: Module) -> PlayedModel:
    """A model of these layers and plain layers, loaded and known to vLLM."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    made = PlayedModel()
    every = *layers, layer(UnquantizedEmbeddingMethod()), layer(UnquantizedLinearMethod()), layer()
    made.layers = torch.nn.ModuleList(every)
    record_metadata_for_reloading(made)
    return made


def worker(loaded: PlayedModel) -> Any:
    """vLLM's own, with what it needs for an update. A dict of tensors is what its trainer sends in one chunk."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.v1.worker.gpu_worker import Worker

    class PlayedEngine(NCCLWeightTransferEngine):
        def update_weights(self, update_info: Tensors) -> None:
            self.model.load_weights(iter(update_info.items()))

    class PlayedWorker(Worker, WeightWorker):
        def __init__(self) -> None:
            self.device, self.rank = torch.device("cpu"), 0
            self.forgotten: set[str] = set()
            self.parallel_config = SimpleNamespace(data_parallel_index=0)
            self.model_config = SimpleNamespace(quantization=None, dtype=torch.float32, model="")
            self.vllm_config = SimpleNamespace(
                lora_config=None,
                model_config=self.model_config,
                parallel_config=self.parallel_config,
                load_config=None,
                speculative_config=None,
            )
            self.model_runner = SimpleNamespace(
                get_model=lambda: loaded,
                reset_lora_state=lambda: None,
                reset_encoder_cache=lambda: self.forgotten.add("images as the model sees them"),
                reset_mm_cache=lambda: self.forgotten.add("images"),
                reload_weights=lambda weights_iterator: reload_weights(
                    self.vllm_config, loaded, weights_iterator, None, True
                ),
            )
            self.weight_transfer_engine = PlayedEngine(SimpleNamespace(), self.vllm_config, self.device, loaded)
            self._weight_update_active = self._weight_update_is_draft = False

    return PlayedWorker()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as on a GPU: vLLM uses unquantized layers there as they were loaded."""
    linear = pytest.importorskip("vllm.model_executor.layers.linear").UnquantizedLinearMethod
    embedding = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding").UnquantizedEmbeddingMethod
    for method in (linear, embedding):
        monkeypatch.setattr(method, "process_weights_after_loading", lambda *_: None)
    monkeypatch.setattr(vllm_in_place, "DEVICES", {"cpu"})


# What is loaded in place.


def test_attention_that_derives_nothing_from_weights_is_and_any_other_is_not() -> None:
    from vllm.v1.attention.backend import AttentionImpl

    class Bare(AttentionImpl):
        def __init__(self) -> None: ...

        def forward(self) -> None: ...

    class Deriving(Bare):
        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            raise AssertionError

    class WithSinks(Deriving):
        _sinks_source: torch.Tensor | None = torch.zeros(1)

    class WithoutSinks(Deriving):
        _sinks_source = None

    told = {impl: not obstacle(worker(model(attention(impl)))) for impl in (Bare, Deriving, WithSinks, WithoutSinks)}
    assert told == {Bare: True, Deriving: False, WithSinks: False, WithoutSinks: True}


def changed(change: Callable[[Module], object]) -> PlayedModel:
    """A model of which a layer was changed after it was loaded."""
    odd = layer()
    loaded = model(odd)
    change(odd)
    return loaded


def as_weight(made: Callable[[Parameter], torch.Tensor]) -> Callable[[Module], object]:
    return lambda odd: setattr(odd, "weight", Parameter(made(odd.weight), requires_grad=False))


@pytest.mark.parametrize(
    ("made", "is_loaded_in_place"),
    [
        (model, True),
        (lambda: model(packed()), False),
        (lambda: changed(as_weight(lambda _: torch.zeros(3, 2))), False),
        (lambda: changed(as_weight(lambda _: torch.zeros(3, 2).t())), False),
        (lambda: changed(as_weight(lambda weight: weight.to(torch.bfloat16))), False),
        (lambda: changed(as_weight(lambda weight: weight.to("meta"))), False),
        (lambda: changed(lambda odd: delattr(odd, "scale")), False),
        (lambda: changed(lambda odd: setattr(odd, "workspace", held(4))), False),
        (lambda: changed(lambda odd: setattr(odd, "bias", held(2))), True),
    ],
    ids=["plain", "packed", "reshaped", "transposed", "cast", "elsewhere", "removed", "added", "a bias beside"],
)
def test_a_model_whose_tensors_are_what_loaders_write_is_loaded_in_place(
    made: Callable[[], PlayedModel], is_loaded_in_place: bool
) -> None:
    assert (not obstacle(worker(made()))) == is_loaded_in_place


def test_neither_a_quantized_model_is_nor_one_on_a_device_that_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker(model())
    one.vllm_config.model_config = SimpleNamespace(quantization="fp8")
    assert obstacle(one) == "quantization fp8: the engine computes with other tensors than it loads"
    monkeypatch.undo()
    assert obstacle(worker(model()))


# The worker after an update.


@pytest.fixture(params=["in place", "layerwise"])
def updated(request: pytest.FixtureRequest) -> Any:
    """A worker whose model is loaded one way or the other."""
    return worker(model(packed()) if request.param == "layerwise" else model())


def sent(one: Any, value: float) -> Tensors:
    """All tensors of its model."""
    return {name: torch.full(tensor.shape, value) for name, tensor in one.get_model().named_parameters()}


def in_two(tensors: Tensors) -> list[Tensors]:
    """Cut within the first layer."""
    (first, *rest) = tensors.items()
    return [dict([first]), dict(rest)]


def where(one: Any) -> list[int]:
    """The addresses of weights, as in a CUDA graph."""
    return [parameter.data_ptr() for parameter in one.get_model().parameters()]


def check_holds(one: Any, value: float, places: list[int]) -> None:
    """It has these weights, where they were, and nothing of any update is left."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded = one.get_model()
    assert all(bool((tensor == value).all()) for tensor in loaded.parameters())
    assert all(bool((part.packed == -value).all()) for part in loaded.modules() if hasattr(part, "packed"))
    assert where(one) == places
    assert "load_weights" not in vars(loaded)
    assert not any(get_layerwise_info(part).can_load() for part in loaded.modules())
    assert not vars(one.weight_transfer_engine).keys() & METHODS
    assert (one.receipts._tee, one._weight_update_active) == (None, False)


def update(one: Any, value: float) -> dict[str, str]:
    one.open_receipt()
    one.start_weight_update()
    for chunk in in_two(sent(one, value)):
        one.update_weights(chunk)
    digests: dict[str, str] = one.close_receipt()
    one.finish_weight_update()
    return digests


def stage(one: Any, chunk: Tensors) -> None:
    """Receive a chunk beside the weights."""
    one.stage_weights(chunk)
    wait_until(lambda: one.staged()["ready"], SOON_S)


# Steps of an update that may be its last: each is one of the engine's calls, or what has the gateway make no more.


def opened(one: Any) -> None:
    one.open_receipt()


def started(one: Any) -> None:
    one.open_receipt()
    one.start_weight_update()


def half_sent(one: Any) -> None:
    started(one)
    one.update_weights(in_two(sent(one, 7))[0])


def broken_in_the_middle(one: Any) -> None:
    """Such as by a trainer that dies: vLLM then ends the session by itself."""
    half_sent(one)
    with pytest.raises(KeyError):
        one.update_weights({"none of its tensors": torch.ones(1)})


def closed(one: Any) -> None:
    started(one)
    for chunk in in_two(sent(one, 7)):
        one.update_weights(chunk)
    one.close_receipt()


def half_staged(one: Any) -> None:
    one.open_receipt()
    stage(one, in_two(sent(one, 7))[0])


def staged(one: Any) -> None:
    one.open_receipt()
    for chunk in in_two(sent(one, 7)):
        stage(one, chunk)
    one.close_receipt()


def staged_and_started(one: Any) -> None:
    staged(one)
    one.start_weight_update()


def swapped_in(one: Any) -> None:
    staged_and_started(one)
    one.load_staged()


def broken_load(one: Any) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from in_two(sent(one, 7))[0].items()
        raise OSError("the folder is gone")

    with pytest.raises(OSError, match="gone"):
        one.reload_weights(weights_iterator=tensors())


ENDS = [opened, started, half_sent, broken_in_the_middle, closed, broken_load]
ENDS += [half_staged, staged, staged_and_started, swapped_in]


def clear(one: Any) -> None:
    """As the gateway does where it has not died itself."""
    one.end_update(drops_receipt=True)


@pytest.mark.parametrize("is_cleared", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_however_an_update_ended_a_version_is_loaded_over_it(
    updated: Any, end: Callable[[Any], None], is_cleared: bool, tmp_path: Path
) -> None:
    save_file(sent(updated, 1), tmp_path / "model.safetensors")
    places = where(updated)
    end(updated)
    if is_cleared:
        clear(updated)
    updated.load_snapshot(str(tmp_path))
    check_holds(updated, 1, places)
    update(updated, 2)
    check_holds(updated, 2, places)
