"""A trainer's tensors to push: names, dtypes, tied weights, and parts."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

import torch
from torch import nn

from engines.errors import InvalidRequest
from engines.types import TensorMeta
from trainer_client.results import ServedWeights
from trainer_client.transports import tensors
from trainer_client.transports.tensors import Entry, parts_of

UNKNOWN = ServedWeights(model="m", tensors=None)


class Model(nn.Module):
    """With a tied head, and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def meta(name: str, dtype: str = "bfloat16") -> TensorMeta:
    return TensorMeta(name=name, dtype=dtype, shape=(1,))


def only_part(source: Any, *served: TensorMeta) -> list[Entry]:
    (part,) = parts_of(source, replace(UNKNOWN, tensors=served or None))
    return list(part.entries)


def names(part: list[Entry]) -> list[str]:
    return [entry.name for entry in part]


def test_a_tied_weight_goes_by_the_name_that_is_served() -> None:
    assert names(only_part(Model(), meta("head.weight"), meta("layer.weight"), meta("layer.bias"))) == [
        "head.weight",
        "layer.weight",
        "layer.bias",
    ]


def test_a_tied_weight_goes_by_both_names_where_the_served_checkpoint_has_both() -> None:
    served = map(meta, ("head.weight", "embed.weight", "layer.weight", "layer.bias"))
    assert names(only_part(Model(), *served))[:2] == ["embed.weight", "head.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["views", "copies"])
def test_a_tied_head_of_a_state_dict_is_its_embedding(dtype: torch.dtype) -> None:
    embed = torch.rand(4, 3)
    given = {name: embed.to(dtype) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    config = json.dumps({"auto_map": {}, "tie_word_embeddings": True})  # of code that transformers does not have
    served = replace(UNKNOWN, tensors=(meta("model.embed_tokens.weight"),), config=config)
    (part,) = parts_of(given, served)
    assert part.announced["names"] == ["model.embed_tokens.weight"]
    with pytest.raises(InvalidRequest, match=r"'model\.embed_tokens\.weight' and 'lm_head\.weight'"):
        list(parts_of(given | {"lm_head.weight": embed + 1}, served))


def test_a_buffer_is_sent_where_it_is_served() -> None:
    served = [meta(name) for name in ("embed.weight", "layer.bias", "layer.weight")]
    assert "scale" in names(only_part(Model(), *served, meta("scale")))
    assert "cache" not in names(only_part(Model(), *served, meta("cache")))


@pytest.mark.parametrize(("held", "sent"), [("bfloat16", torch.bfloat16), ("float8_e4m3fn", torch.float32)])
def test_floats_go_in_the_dtype_that_is_served(held: str, sent: torch.dtype) -> None:
    (entry,) = only_part({"w": torch.ones(2)}, meta("w", held))
    assert entry.dtype == sent
    assert entry.made().dtype == sent


def test_a_tensor_whose_first_name_a_hook_leaves_out_goes_by_its_other_name() -> None:
    model = Model()

    def leave_out(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state.pop("embed.weight")

    model.register_state_dict_post_hook(leave_out)
    assert names(only_part(model)) == ["layer.weight", "layer.bias", "head.weight"]


@pytest.mark.parametrize(
    "name",
    [
        "module.layers.0.w", "_orig_mod.module.layers.0.w", "module._orig_mod.layers.0.w",
        "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.w",
    ],
)  # fmt: skip
def test_what_wrappers_add_to_names_is_taken_off(name: str) -> None:
    (part,) = parts_of({name: torch.ones(1)}, replace(UNKNOWN, tensors=(meta("layers.0.w"),)))
    assert part.announced["names"] == ["layers.0.w"]


def test_a_compiled_model_is_the_model() -> None:
    assert names(only_part(torch.compile(Model()))) == names(only_part(Model()))


@pytest.mark.parametrize("given", [3, None])
def test_what_is_no_tensor_is_told_by_its_type(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"'w' as builtins.{type(given).__name__}: give a torch.Tensor"):
        list(parts_of({"w": given}, UNKNOWN))


def test_a_model_that_wears_a_lora_adapter_is_refused_with_the_remedy() -> None:
    model = Model()
    model.layer = nn.ModuleDict({"base_layer": nn.Linear(3, 3), "lora_A": nn.Linear(3, 1)})
    with pytest.raises(
        InvalidRequest, match=r"'layer\.base_layer\.weight', a part of a PEFT adapter.*merge_and_unload"
    ):
        list(parts_of(model, UNKNOWN))


@pytest.mark.parametrize("source", [[torch.ones(1)], [(1, torch.ones(1))], "model.pt"])
def test_what_is_no_tensor_is_refused(source: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"give a torch\.nn.Module, a mapping, or pairs of name and tensor"):
        list(parts_of(source, UNKNOWN))


@pytest.mark.parametrize("source", [{}, [], iter(())])
def test_nothing_is_no_update(source: Any) -> None:
    with pytest.raises(InvalidRequest, match="named_tensors is empty"):
        list(parts_of(source, UNKNOWN))


@pytest.mark.parametrize("as_given", [list, iter], ids=["a sequence", "an iterator"])
def test_a_name_that_comes_twice_is_refused(as_given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PART_BYTES", 1)
    pairs = [("w", torch.ones(3)), ("v", torch.ones(3)), ("_orig_mod.w", torch.zeros(3))]
    with pytest.raises(InvalidRequest, match="two tensors named 'w'"):
        list(parts_of(as_given(pairs), UNKNOWN))


@pytest.mark.parametrize(
    ("tensor", "form"),
    [
        (torch.empty(2, device="meta"), "on the meta device"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo torch.float32"),
    ],
)
def test_a_tensor_without_plain_bytes_is_refused_by_name(tensor: torch.Tensor, form: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'layer.weight' {form}: give a dense tensor"):
        only_part({"layer.weight": tensor})
