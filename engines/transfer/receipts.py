"""The receipt of an update in a worker: its tensors get the checkpoint's names, and are loaded and copied.

It takes the place of the model's `load_weights`, so it has the tensors of any receiver, gloo or NCCL.
"""

from collections.abc import Callable, Iterable
from typing import Any

from engines.checkpoint.names import CheckpointNames, Incoming
from engines.engine import ReceiptCopy
from engines.errors import WeightUpdateFailed
from engines.transfer.packing import NamedTensor
from engines.transfer.scribe import Scribe

Load = Callable[[Iterable[NamedTensor]], Any]


class Receipts:
    """Opens one receipt after the other in one worker."""

    def __init__(self) -> None:
        self._model: Any = None
        self._load: Load
        self._incoming: Incoming
        self._copying: Scribe | None = None
        self._scribe: Scribe | None = None

    def open(
        self,
        model: Any,
        load: Load | None = None,
        copy: ReceiptCopy | None = None,
        names: CheckpointNames | None = None,
    ) -> None:
        """Take the tensors that the `load_weights` of `model` gets from now on, and load them by `load`; default: the
        model's own. With `copy`, also write them down. All have the checkpoint's names."""
        self.drop()
        self._copying = _scribe_after(self._scribe, copy) if copy is not None else None
        self._scribe = self._copying or self._scribe
        self._incoming = Incoming(names or CheckpointNames())
        self._model, self._load = model, load or model.load_weights
        model.load_weights = self._take

    def load_by(self, load: Load) -> None:
        """Hand tensors to `load` from now on."""
        if self._model is None:
            raise WeightUpdateFailed("there is no open receipt")
        self._load = load

    def close(self) -> None:
        """Take no more. The copy is finished by `keep`."""
        model, self._model = self._model, None
        if model is not None:
            vars(model).pop("load_weights", None)
            if self._copying is not None:
                self._copying.close()

    def keep(self) -> None:
        """Finish the draft in the background, or note there why it failed."""
        if self._scribe is not None:
            self._scribe.keep()

    def kept(self) -> None:
        """Finish the draft, and return once it is written, or the reason of its failure is."""
        self.keep()
        if self._scribe is not None:
            self._scribe.join()

    def drop(self) -> None:
        """Take no more; the draft is discarded unless it is kept."""
        if self._scribe is not None and not self._scribe.is_kept:
            self._scribe.give_up("the update was aborted")
        self.close()

    def _take(self, weights: Iterable[NamedTensor]) -> Any:
        tensors = self._incoming.converted(weights)
        if self._copying is None:
            return self._load(tensors)
        # The copy to the host runs beside the load; reuse of the receiver's buffer waits for it.
        with self._copying.copying(tensors):
            return self._load(tensors)


def _scribe_after(before: Scribe | None, copy: ReceiptCopy) -> Scribe:
    """Return the next scribe, once the scribe before has ended: two would need twice the memory."""
    scribe = Scribe(copy)
    if before is not None and not before.join(copy.wait_s):
        scribe.give_up("the version before is still being written (weights.store_wait_s)")
    return scribe
