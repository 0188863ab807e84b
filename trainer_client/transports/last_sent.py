"""What a sender gave the store last, in host memory, so that it writes the elements that have changed since.

The copy is as large as the model. To read the version before from the store instead would need none, and would bring
all of it over the network to a trainer on another machine, in every step, to save writing it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from engines.store.changed_elements import Array, ChangedElements
from engines.store.draft import ChangedTensor, RawTensor
from engines.store.manifest import StoredTensor, digest_of

_WORTH = 0.25
"""Changed elements are written where they take less than this share of the tensor: joining them costs as well."""


@dataclass(slots=True)
class _Sent:
    content: Array
    digest: str


class LastSent:
    """Of each tensor the bytes that were sent last. What is to be sent next takes their place."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Sent] = {}

    def narrowed(self, tensor: RawTensor, base: Mapping[str, StoredTensor]) -> RawTensor | ChangedTensor:
        """The tensor as it is to be written: as changes, where `base`, the version served, has what was sent last."""
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
        """Everything goes whole next."""
        self._tensors.clear()


def _width(tensor: RawTensor) -> int:
    num_elements = int(np.prod(tensor.shape, dtype=np.int64))
    return max(1, tensor.num_bytes // max(1, num_elements))
