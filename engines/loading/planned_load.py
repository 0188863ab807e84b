"""Loads tensors into a model as its own loaders do, by replaying copies recorded when the loaders first ran.

Loaders find the place of a tensor by its name, in Python: 4 ms a chunk of a dense 7B, 40 ms a layer of 128 experts.
Generation stops for that time. Without quantization loaders only copy parts of tensors into parts of parameters, the
same parts each time. So they run once with tensors that have no content (torch's meta device), which overwrites
nothing. Tensors whose loaders do more than copy are loaded by these loaders each time.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy as shallow
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.transfer.packing import NamedTensor
from engines.types import TensorMeta

log = logging.getLogger("vllm.rollout_gateway")  # a worker's log is vLLM's

Load = Callable[[Iterable[NamedTensor]], object]
_HOST = torch.device("cpu")

Form = tuple[str, torch.Size, torch.dtype]
"""Name, shape and dtype: tensors that loaders treat alike."""

_Kind = tuple[torch.dtype, torch.dtype, bool]
"""Dtypes of source and place, and True if both are contiguous: one kernel copies a list of one kind."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy into `place`, a part of a parameter, of a contiguous tensor's part that begins at element `offset`."""

    place: torch.Tensor
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    kind: _Kind

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_whole:
            return tensor
        return tensor.as_strided(self.place.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(slots=True)
class _Plan:
    """The copies of a loader for one tensor, and its fills of places with a number: a shard of a vocabulary has padding
    rows behind its content."""

    copies: list[_Copy] = field(default_factory=list)
    fills: list[tuple[torch.Tensor, float]] = field(default_factory=list)


_Planned = tuple[_Plan, torch.Tensor]
"""A tensor that is copied by plan."""


class PlannedLoad:
    """The loads of one worker's model. Call `begin` before the tensors of an update; `load` takes them in any parts.

    obstacle: the reason why weights are not loaded in place, but by the engine's own loader; "" where they are.
    """

    def __init__(
        self, model: Any, load: Load | None = None, *, device: torch.device = _HOST, obstacle: str = ""
    ) -> None:
        """`load` replaces the loader of the model's class."""
        self.device = device
        self.obstacle = obstacle
        self._model = model
        self.load_by_engine: Load = load or (lambda tensors: type(model).load_weights(model, tensors))
        self._places: tuple[int, ...] = ()
        self._plans: dict[Form, _Plan | None] = {}

    def begin(self) -> None:
        """Forget plans where parameters have moved."""
        if self.obstacle:
            return
        if (places := tuple(parameter.data_ptr() for parameter in self._model.parameters())) != self._places:
            self._places = places
            self._plans.clear()

    def plan(self, forms: Iterable[Form]) -> None:
        """Record the plans of tensors of these forms, unless they are known."""
        unknown = [form for form in forms if form not in self._plans]
        if unknown and not self.obstacle:
            self._plans |= self._recorded(unknown)

    def load(self, weights: Iterable[NamedTensor]) -> None:
        """Load these tensors. Errors are the loaders' own, such as for a name that the model does not have."""
        if self.obstacle:
            self.load_by_engine(weights)
            return
        # The last of a name counts, as for loaders: a GPU copies a list in no order.
        tensors = list(dict(weights).items())
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        self.plan(forms)
        planned, rest = [], []
        for form, named in zip(forms, tensors, strict=True):
            plan = self._plans[form]
            if plan is None or not named[1].is_contiguous():
                rest.append(named)
            else:
                planned.append((plan, named[1]))
        if rest:
            self.load_by_engine(rest)
        _run(planned)

    def _recorded(self, forms: Sequence[Form]) -> Mapping[Form, _Plan | None]:
        """Return a plan for each form; None where its loader has to run each time."""
        try:
            return self._record(forms)
        except Exception:  # loaders raise the same error again with the tensors themselves
            return {form: self._recorded_alone(form) for form in forms}

    def _recorded_alone(self, form: Form) -> _Plan | None:
        """Return the plan of one form; None for a loader that keeps a tensor until another comes and needs both."""
        try:
            plan = self._record([form])[form]
        except Exception as error:
            log.info("%s is loaded by the model's own loader each time: %r", form[0], error)
            return None
        return plan if plan.copies else None

    def _record(self, forms: Sequence[Form]) -> dict[Form, _Plan]:
        stand_ins = {form: torch.empty(form[1], dtype=form[2], device="meta") for form in forms}
        recorder = _Recorder(stand_ins)
        held = [(parameter, parameter.data) for parameter in self._model.parameters()]
        kept = [(found, shallow(found)) for found in _containers(self._model)]
        try:
            with recorder:
                self.load_by_engine([(form[0], tensor) for form, tensor in stand_ins.items()])
        finally:
            moved = [(parameter, data) for parameter, data in held if parameter.data_ptr() != data.data_ptr()]
            for parameter, data in moved:
                parameter.data = data
            for found, before in kept:
                _restore(found, before)
        if moved:
            raise _DoesMore("a parameter that is put elsewhere")
        return recorder.plans


def _containers(model: Any) -> list[Any]:
    """Return the collections in which a model's loaders may keep a tensor until its partner comes."""
    return [
        found
        for module in model.modules()
        for name, found in vars(module).items()
        if isinstance(found, dict | list | set) and not name.startswith("_")
    ]


def _restore(found: Any, before: Any) -> None:
    """Give a collection its content of before, if a tensor without content was put there."""
    held = found.values() if isinstance(found, dict) else found
    if any(isinstance(one, torch.Tensor) and one.is_meta for one in held):
        found.clear()
        found.extend(before) if isinstance(found, list) else found.update(before)


def form_of(tensor: TensorMeta) -> Form:
    return tensor.name, torch.Size(tensor.shape), getattr(torch, tensor.dtype)


def _run(planned: Sequence[_Planned]) -> None:
    """Copy all parts, then fill the padding rows."""
    pairs: dict[_Kind, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for plan, tensor in planned:
        for copy in plan.copies:
            places, parts = pairs.setdefault(copy.kind, ([], []))
            places.append(copy.place)
            parts.append(copy.part_of(tensor))
    with torch.no_grad():
        for places, parts in pairs.values():
            torch._foreach_copy_(places, parts)
        for plan, _ in planned:
            for place, value in plan.fills:
                place.fill_(value)


class _DoesMore(Exception):
    """A loader does more than copy and fill."""


class _Recorder(TorchDispatchMode):
    """Records copies and fills without doing them. Allows views; raises `_DoesMore` for all other operations."""

    def __init__(self, stand_ins: dict[Form, torch.Tensor]) -> None:
        super().__init__()
        self.plans = {form: _Plan() for form in stand_ins}
        # A tensor without content has no address: it is known by its storage, which `stand_ins` keeps.
        self._forms = {tensor.untyped_storage()._cdata: form for form, tensor in stand_ins.items()}
        self._stand_ins = stand_ins
        self._last: tuple[_Plan, torch.Tensor] | None = None  # plan and place of the last copy
        self._filled: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args[:2])
        if func is torch.ops.aten.fill_.Scalar:
            return self._fill(*args)
        # Numbers are read from the model's own tables, such as from the map of experts to ranks.
        reads_table = func is torch.ops.aten._local_scalar_dense.default and not args[0].is_meta
        if func.is_view or reads_table:
            return func(*args, **(kwargs or {}))
        raise _DoesMore(str(func))

    def _copy(self, place: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        form = self._forms.get(source.untyped_storage()._cdata)
        if form is None or source.shape != place.shape or source.dtype != form[2] or place.is_meta:
            raise _DoesMore("a copy of something else")
        if any(_overlap(place, filled) for filled in self._filled):
            raise _DoesMore("a fill before the copy")  # a plan fills after its copies
        self.plans[form].copies.append(_copy(place, source, self._stand_ins[form]))
        self._last = self.plans[form], place
        return place

    def _fill(self, place: torch.Tensor, value: float) -> torch.Tensor:
        """Record a fill of the rest of a parameter, after the copy into it."""
        plan, copied = self._last or (None, place)
        if plan is None or not _share(place, copied) or _overlap(place, copied):
            raise _DoesMore("a fill by itself")
        if place.numel():
            plan.fills.append((place, value))
            self._filled.append(place)
        return place


def _copy(place: torch.Tensor, source: torch.Tensor, whole: torch.Tensor) -> _Copy:
    """Return the copy of `source`, a part of `whole`, which is contiguous and begins its storage."""
    stride, offset = source.stride(), source.storage_offset()
    is_whole = offset == 0 and source.shape == whole.shape and stride == whole.stride()
    kind = place.dtype, source.dtype, place.is_contiguous() and source.is_contiguous()
    return _Copy(place, stride, offset, is_whole, kind)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True where both are parts of one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True where two parts may share elements."""
    if not _share(one, other):
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return begin < other_end and other_begin < end


def _extent(part: torch.Tensor) -> tuple[int, int]:
    """Return the begin and end (exclusive) of a part, in elements of its storage."""
    begin = part.storage_offset()
    if not part.numel():
        return begin, begin
    return begin, begin + 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
