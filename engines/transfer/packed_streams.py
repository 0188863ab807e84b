"""vLLM's packed transfer with the same streams in each update, on either end.

Up to 0.27 it takes new ones for every update. Memory that torch has used on a stream it keeps for that stream, so each
update takes its buffers of a gigabyte anew and leaves them behind, 32 times on a GPU (vLLM's issue 52950).
"""

from itertools import cycle
from types import ModuleType
from typing import Any

import torch

_STREAMS = 2
"""As many as the transfer has buffers, unless it is told otherwise."""


def keep_streams() -> None:
    """Mend this process's vLLM where that has not been done and it does not do so itself."""
    from vllm.distributed.weight_transfer import packed_tensor

    if not hasattr(packed_tensor, "_get_streams") and not isinstance(packed_tensor.torch, _Torch):
        packed_tensor.torch = _Torch(torch, cuda=_Torch(torch.cuda, Stream=_Streams()))


class _Torch(ModuleType):
    """A module but for some of its names."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Streams:
    """Called as a stream's class is, without arguments."""

    def __init__(self) -> None:
        self._turns: dict[int, Any] = {}

    def __call__(self) -> Any:
        device = torch.cuda.current_device()
        if device not in self._turns:
            self._turns[device] = cycle([torch.cuda.Stream(device) for _ in range(_STREAMS)])
        return next(self._turns[device])
