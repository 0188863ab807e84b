"""Receipts of a worker's updates: the tee of the update under way, and the scribe of its copy."""

from typing import Any

from engines.checkpoint.names import CheckpointNames
from engines.engine import ReceiptCopy
from engines.errors import WeightUpdateFailed
from engines.transfer.tee import Load, Scribe, WeightTee


class Receipts:
    """Opens one receipt after the other in one worker."""

    def __init__(self) -> None:
        self._tee: WeightTee | None = None
        self._scribe: Scribe | None = None

    def open(
        self,
        model: Any,
        load: Load | None = None,
        copy: ReceiptCopy | None = None,
        names: CheckpointNames | None = None,
    ) -> None:
        """Digest the tensors that the `load_weights` of `model` gets from now on, and load them by `load`; default:
        the model's own. With `copy`, also write them down. All see the checkpoint's names."""
        self.drop()
        scribe = _scribe_after(self._scribe, copy) if copy is not None else None
        self._scribe = scribe or self._scribe
        self._tee = WeightTee(model, scribe, load, names)

    def load_by(self, load: Load) -> None:
        """Hand tensors to `load` from now on."""
        if self._tee is None:
            raise WeightUpdateFailed("there is no open receipt")
        self._tee.load_by(load)

    def close(self) -> dict[str, str]:
        """Return the digest of each received tensor. The copy is finished by `keep`."""
        tee, self._tee = self._tee, None
        return tee.close() if tee is not None else {}

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
        """Stop digesting and copying; the draft is discarded unless it is kept."""
        tee, self._tee = self._tee, None
        if tee is not None:
            tee.remove()
        if self._scribe is not None and not self._scribe.is_kept:
            self._scribe.give_up("the update was aborted")


def _scribe_after(before: Scribe | None, copy: ReceiptCopy) -> Scribe:
    """Return the next scribe, once the scribe before has ended: two would need twice the memory."""
    scribe = Scribe(copy)
    if before is not None and not before.join(copy.wait_s):
        scribe.give_up("the version before is still being written (weights.store_wait_s)")
    return scribe
