"""The draft of a worker that decodes speculatively: which of its weights an update changes.

Tokens are right whatever the draft holds, since the target checks each. A draft with old weights is only right less
often, and tokens come slower. Parts that a draft shares with the target are loaded with the target. The rest changes
where the draft is a part of the target's own checkpoint (MTP layers), and the trainer sends that part.
"""

from collections.abc import Iterable
from typing import Any

from engines.loading.planned_load import Form, Load, PlannedLoad
from engines.transfer.packing import NamedTensor


class Draft:
    """The draft of one worker.

    method: the engine's name of the method; "" in an engine that does not decode speculatively.
    model: its model; None for a method without weights, such as a look-up of n-grams.
    obstacle: why no update changes its own weights; "" where updates may.
    """

    def __init__(self, method: str = "", model: Any = None, target: Any = None, obstacle: str = "") -> None:
        self.method = method
        self._model = model
        self._obstacle = obstacle
        theirs = set() if model is None else {id(parameter) for parameter in target.parameters()}
        held = [] if model is None else list(model.parameters())
        self._own = {_storage(parameter) for parameter in held if id(parameter) not in theirs}
        self._in_place = PlannedLoad(model) if self._own and not obstacle else None

    @property
    def takes_tensors(self) -> bool:
        """True where updates are loaded into its own weights."""
        return self._in_place is not None

    def plan(self, forms: Iterable[Form]) -> None:
        """Plan the loads of a checkpoint's tensors, before an update."""
        if self._in_place is not None:
            self._in_place.begin()
            self._in_place.plan(forms)

    def begin(self) -> None:
        """Begin an update."""
        if self._in_place is not None:
            self._in_place.begin()

    def beside(self, load: Load) -> Load:
        """Return a loader that hands tensors to `load`, then the draft's own to the draft."""
        if self._in_place is None:
            return load

        def load_both(weights: Iterable[NamedTensor]) -> object:
            tensors = list(weights)
            loaded = load(tensors)
            self._load(tensors)
            return loaded

        return load_both

    def describe(self) -> str:
        """Return its method, and what updates do to its own weights; "" without a method."""
        if self._model is None:
            return self.method and f"{self.method}, without weights"
        if not self._own:
            return f"{self.method}, whose weights are all the model's"
        if self._in_place is None:
            return f"{self.method}, frozen: {self._obstacle}"
        return f"{self.method}, updated where the trainer sends its tensors"

    def _load(self, tensors: list[NamedTensor]) -> None:
        assert self._in_place is not None
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        self._in_place.plan(forms)
        places = [{_storage(place) for place in self._in_place.places(form)} & self._own for form in forms]
        own = [named for named, reached in zip(tensors, places, strict=True) if reached]
        if own:
            self._in_place.load(own)


def own_checkpoint(path: str, target: str) -> str:
    """Return why an update has nothing for a draft whose checkpoint is not the target's; "" where it is.

    Its tensors may have the names of the target's: a loader would take one for the other.
    """
    return "" if path == target else f"its checkpoint is its own ({path}): no update has its tensors"


def _storage(tensor: Any) -> int:
    """Return the address of the memory that a tensor is a part of."""
    return int(tensor.untyped_storage().data_ptr())
