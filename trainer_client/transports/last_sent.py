"""The tensors sent to the store last, kept in host memory to find changed elements.

The copy is as large as the model. The alternative, to read the version before from the store, would move a whole
version over the network to a trainer on another machine in every step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from engines.store.changed_elements import Array, ChangedElements
from engines.store.draft import ChangedTensor, RawTensor
from engines.store.manifest import StoredTensor, digest_of

_WORTH = 0.25
"""Largest share of a tensor's bytes to write as changed elements: joining them has a cost too."""


@dataclass(slots=True)
class _Sent:
    content: Array
    digest: str


class LastSent:
    """The last sent bytes of each tensor, replaced by each send."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Sent] = {}

    def narrowed(self, tensor: RawTensor, base: Mapping[str, StoredTensor]) -> RawTensor | ChangedTensor:
        """Return the tensor for the store: only its changes, if few and if `base`, the served version, has the last
        sent bytes."""
        content, digest = np.frombuffer(tensor.bytes, np.uint8), digest_of(tensor.bytes)
        sent, served = self._tensors.get(tensor.name), base.get(tensor.name)
        if sent is None or sent.content.size != content.size:
            self._tensors[tensor.name] = _Sent(content.copy(), digest)
            return replace(tensor, digest=digest)
        before, sent.digest = sent.digest, digest
        elements = ChangedElements.between(sent.content, content, _width(tensor))
        elements.apply_to(sent.content)
        is_worth_it = elements.num_bytes < _WORTH * tensor.num_bytes
        is_like_it = served is not None and (served.digest, served.dtype, served.shape) == (
            before,
            tensor.dtype,
            list(tensor.shape),
        )
        if not (is_worth_it and is_like_it):
            return replace(tensor, digest=digest)
        return ChangedTensor(tensor.name, tensor.dtype, tensor.shape, digest, before, elements)

    def forget(self) -> None:
        """Forget all tensors: the next send is complete."""
        self._tensors.clear()


def _width(tensor: RawTensor) -> int:
    num_elements = int(np.prod(tensor.shape, dtype=np.int64))
    return max(1, tensor.num_bytes // max(1, num_elements))
