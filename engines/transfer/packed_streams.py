"""A fix of vLLM's packed transfer, on both ends: the same CUDA streams in each update.

vLLM up to 0.27 creates new streams for every update. torch caches memory per stream, so each update allocates its 1 GB
buffers again and leaks the old ones, 32 times on a GPU (vLLM's issue 52950).
"""

from itertools import cycle
from types import ModuleType
from typing import Any

import torch

_STREAMS = 2
"""The transfer's default number of buffers."""


def keep_streams() -> None:
    """Patch this process's vLLM once, unless its release has the fix."""
    from vllm.distributed.weight_transfer import packed_tensor

    if not hasattr(packed_tensor, "_get_streams") and not isinstance(packed_tensor.torch, _Torch):
        packed_tensor.torch = _Torch(torch, cuda=_Torch(torch.cuda, Stream=_Streams()))


class _Torch(ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Streams:
    """Replaces the stream class: a call returns the next stream of the current device."""

    def __init__(self) -> None:
        self._turns: dict[int, Any] = {}

    def __call__(self) -> Any:
        device = torch.cuda.current_device()
        if device not in self._turns:
            self._turns[device] = cycle([torch.cuda.Stream(device) for _ in range(_STREAMS)])
        return next(self._turns[device])
