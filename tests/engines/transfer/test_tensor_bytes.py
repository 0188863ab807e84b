"""The bytes of tensors are those of their values, whatever their memory holds."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from engines.transfer.tensor_bytes import digest_on_host, raw_tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(1).expand(3, 4),
        torch.arange(12.0)[::3],
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    ],
    ids=["transposed", "expanded", "strided", "negated"],
)
def test_views_give_the_bytes_of_their_values(tensor: torch.Tensor) -> None:
    found = np.frombuffer(raw_tensor("w", tensor).bytes, np.float32)
    assert found.tolist() == tensor.flatten().tolist()
    assert digest_on_host(tensor) == digest_on_host(tensor.contiguous())
