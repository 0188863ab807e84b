"""Our mends of LoRA in vLLM's CPU build, on its own operators."""

import pytest

from engines.inside_vllm import lora as vllm_lora


def test_a_row_without_an_adapter_gets_none_though_the_last_place_is_taken() -> None:
    torch = pytest.importorskip("torch")
    lora_ops = pytest.importorskip("vllm.lora.ops.torch_ops.lora_ops")
    vllm_lora.mend()
    vllm_lora.mend()  # once is enough
    rows, adapters = torch.ones(4, 8), torch.tensor([-1, 0, 2, -1])
    shrunk = torch.full((4, 2), 7.0)
    lora_ops.bgmv_shrink(rows, torch.ones(3, 1, 2, 8), shrunk, adapters, 0.5)
    assert shrunk.tolist() == [[0, 0], [4, 4], [4, 4], [0, 0]]
    added = torch.zeros(4, 5)
    lora_ops.bgmv_expand(shrunk, torch.ones(3, 1, 5, 2), added, adapters)
    assert added[:, 0].tolist() == [0, 8, 8, 0]
