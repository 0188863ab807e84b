"""Changes since the last push, by the bytes that would be sent."""

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

import torch

from engines.errors import InvalidRequest
from trainer_client.served import ServedWeights
from trainer_client.transports.pushed import Pushed
from trainer_client.transports.tensors import Entry, layer_of

Q, K, NORM, HEAD = "model.layers.0.q_proj.weight", "model.layers.0.k_proj.weight", "model.norm.weight", "lm_head.weight"


def served(update: str | None) -> ServedWeights:
    return ServedWeights(model="tiny", version=1, update=update, tensors=None, gpus={})


def entries(*, dtype: torch.dtype = torch.float32, **added: float) -> list[Entry]:
    """Four tensors of different sizes, with something added to some."""
    sizes = {Q: 8, K: 6, NORM: 2, HEAD: 12}
    short = {"q": Q, "k": K, "norm": NORM, "head": HEAD}
    moved = {short[name]: value for name, value in added.items()}
    return [Entry(name, torch.ones(size) + moved.get(name, 0.0), dtype) for name, size in sizes.items()]


def alone(flags: Sequence[bool], *, failed: bool = False) -> list[bool]:
    return list(flags)


def names(part: list[Entry]) -> list[str]:
    return [entry.name for entry in part]


def pushed_once(*, by_layer: bool = False, dtype: torch.dtype = torch.float32) -> Pushed:
    pushed = Pushed(by_layer=by_layer)
    pushed.begin()
    assert len(pushed.changed(entries(dtype=dtype), served(None), alone)) == 4
    pushed.committed(served("first"))
    pushed.begin()
    return pushed


def test_what_has_not_changed_is_left_out() -> None:
    assert names(pushed_once().changed(entries(k=1, head=1), served("first"), alone)) == [K, HEAD]


def test_a_layer_goes_together_where_engines_load_it_together() -> None:
    assert names(pushed_once(by_layer=True).changed(entries(k=1), served("first"), alone)) == [Q, K]


def test_a_push_that_failed_counts_for_nothing() -> None:
    pushed = pushed_once()
    assert names(pushed.changed(entries(k=1), served("first"), alone)) == [K]
    pushed.begin()
    assert names(pushed.changed(entries(k=1), served("first"), alone)) == [K]
    pushed.committed(served("second"))
    pushed.begin()
    assert names(pushed.changed(entries(k=1, q=1), served("second"), alone)) == [Q]


def test_what_changed_on_another_rank_is_sent() -> None:
    others = [False, False, True, False]

    def any_rank(flags: Sequence[bool], *, failed: bool = False) -> list[bool]:
        return [mine or other for mine, other in zip(flags, others, strict=True)]

    assert names(pushed_once().changed(entries(), served("first"), any_rank)) == [NORM]


def test_a_layer_that_comes_in_two_parts_is_refused_where_it_must_go_together() -> None:
    pushed = pushed_once(by_layer=True)
    pushed.changed(entries()[:1], served("first"), alone)
    with pytest.raises(InvalidRequest, match=r"k_proj\.weight' is in another part than other tensors of 'model"):
        pushed.changed(entries()[1:], served("first"), alone)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "model.layers.11"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("visual.blocks.0.attn.qkv.bias", "visual.blocks.0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("weight", "weight"),
    ],
)
def test_the_layer_of_a_tensor(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_what_was_pushed_before_another_trainers_version_counts_for_nothing() -> None:
    pushed = pushed_once()
    assert names(pushed.changed([one for one in entries() if one.name == NORM], served("another"), alone)) == [NORM]
    assert pushed.adds_to is None
    pushed.committed(served("second"))
    pushed.begin()
    assert names(pushed.changed(entries(), served("second"), alone)) == [Q, K, HEAD]
    assert pushed.adds_to == "second"
