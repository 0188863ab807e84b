"""The stand-ins of AsyncGRPO without CUDA: an attention in plain torch, and an end of the weight group."""

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.process.port import free_port
from trainer_client.trl_async import Endpoint, TorchAttention

pytestmark = pytest.mark.vllm

HEADS, KEY_HEADS, SIZE = 4, 2, 8
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
attention = TorchAttention.flash_attn_varlen_func


def drawn(tokens: int) -> Tensors:
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, HEADS, SIZE, generator=generator),
        torch.randn(tokens, KEY_HEADS, SIZE, generator=generator),
        torch.randn(tokens, KEY_HEADS, SIZE, generator=generator),
    )


def attended(*drawn: torch.Tensor) -> torch.Tensor:
    """torch's own, of one whole sequence."""
    q, k, v = (x.transpose(0, 1) for x in drawn)
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def test_a_branch_sees_the_whole_path_that_leads_to_it() -> None:
    query, key, value = drawn(6)
    whole = attended(query, key, value)
    # The first four tokens are shared; the branch of the last two has all six as its path.
    path = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
    found = attention(query, key[path], value[path], ends(4, 2), ends(4, 6), 4, 6)
    assert torch.allclose(found, whole, atol=1e-6)


def test_trl_lets_go_of_the_group_by_its_store() -> None:
    endpoint = Endpoint("127.0.0.1", free_port(), 0, 1, 5.0)
    endpoint.join()
    endpoint.group.store = None
    with pytest.raises(Exception, match="closed the group"):
        endpoint.broadcast(torch.zeros(1))
