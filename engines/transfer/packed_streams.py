"""A fix of vLLM's packed transfer, on both ends: the same CUDA streams in each update.

vLLM up to 0.27 creates new streams for every update. torch caches memory per stream, so each update allocates its
buffers again and leaks the old ones, 32 times on a GPU (vLLM's issue 52950).
"""

from types import ModuleType
from typing import Any

import torch


def keep_streams() -> None:
    """Give the next transfer of this process the streams of the transfer before. Call it before each transfer."""
    from vllm.distributed.weight_transfer import packed_tensor

    if hasattr(packed_tensor, "_get_streams"):  # the release has the fix
        return
    if not isinstance(packed_tensor.torch, _Torch):
        packed_tensor.torch = _Torch(torch, cuda=_Torch(torch.cuda, Stream=_Streams()))
    packed_tensor.torch.cuda.Stream.rewind()


class _Torch(ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Streams:
    """Replaces the stream class: a call returns the next stream of the current device, and creates it if need be."""

    def __init__(self) -> None:
        self._made: dict[int, list[Any]] = {}
        self._taken: dict[int, int] = {}

    def rewind(self) -> None:
        """Begin again with the first stream: a transfer takes one for each of its buffers."""
        self._taken.clear()

    def __call__(self) -> Any:
        device = torch.cuda.current_device()
        made, taken = self._made.setdefault(device, []), self._taken.get(device, 0)
        self._taken[device] = taken + 1
        if taken == len(made):
            made.append(torch.cuda.Stream(device))
        return made[taken]
