"""Loads tensors into a model as its own loaders do, by copies that were written down when those ran for the first time.

Loaders find a tensor's place by its name, in Python, 4 ms for each chunk of a 7B, and generation stands still for it.
What they do for a model without quantization is to copy parts of tensors into parts of parameters, the same ones each
time. They are run once with tensors that have no content (torch's meta device), so that nothing is overwritten; a model
whose loaders do anything else has them run each time.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.transfer.gloo import NamedTensor

log = logging.getLogger("vllm.rollout_gateway")  # a worker's log is vLLM's

_Form = tuple[str, torch.Size, torch.dtype]
"""Name, shape and dtype: tensors that loaders treat alike."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Into `place`, a part of a parameter, goes the part of a contiguous tensor that begins at element `offset`."""

    place: torch.Tensor
    stride: tuple[int, ...]
    offset: int

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.offset == 0 and self.place.shape == tensor.shape:
            return tensor
        return tensor.as_strided(self.place.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(slots=True)
class _Plan:
    """What becomes of one tensor. A shard of a vocabulary has rows behind it that are set to a number."""

    copies: list[_Copy]
    fills: list[tuple[torch.Tensor, float]]


class PlannedLoad:
    """The loads of one model. `begin` comes before the tensors of an update, `load` takes them in any parts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._places: tuple[int, ...] = ()
        self._plans: dict[_Form, _Plan] = {}
        self._unplanned: set[frozenset[_Form]] = set()

    def begin(self) -> None:
        """Forget what was written down of parameters that lie elsewhere now."""
        places = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        if places != self._places:
            self._places = places
            self._plans.clear()
            self._unplanned.clear()

    def load(self, weights: Iterable[NamedTensor]) -> None:
        """Raises what the loaders raise, such as for a name that the model does not have."""
        tensors = list(weights)
        plans = self._planned(tensors)
        if plans is None:
            type(self._model).load_weights(self._model, tensors)
            return
        places, parts = [], []
        for plan, (_, tensor) in zip(plans, tensors, strict=True):
            places += [copy.place for copy in plan.copies]
            parts += [copy.part_of(tensor) for copy in plan.copies]
        with torch.no_grad():
            if places:
                torch._foreach_copy_(places, parts)
            for place, value in chain.from_iterable(plan.fills for plan in plans):
                place.fill_(value)

    def load_all(self, weights: Iterable[NamedTensor], batch_bytes: int) -> None:
        """As `load`, of tensors that come one by one: so many bytes at a time."""
        for batch in _batches(weights, batch_bytes):
            self.load(batch)

    def _planned(self, tensors: Sequence[NamedTensor]) -> list[_Plan] | None:
        """A plan for each. None where the loaders have to be asked."""
        forms = [_form(named) for named in tensors]
        unknown = [form for form in forms if form not in self._plans]
        if unknown and (made := self._plan(unknown)) is not None:
            self._plans |= made
        if not all(
            form in self._plans and tensor.is_contiguous() for form, (_, tensor) in zip(forms, tensors, strict=True)
        ):
            return None
        return [self._plans[form] for form in forms]

    def _plan(self, forms: Sequence[_Form]) -> dict[_Form, _Plan] | None:
        if frozenset(forms) in self._unplanned:
            return None
        stand_ins = {form: torch.empty(form[1], dtype=form[2], device="meta") for form in forms}
        recorder = _Recorder(stand_ins)
        try:
            with recorder:
                type(self._model).load_weights(self._model, [(form[0], one) for form, one in stand_ins.items()])
        except Exception as error:  # whatever loaders stumble over, they get the tensors themselves, and say it then
            log.info("%d tensors are loaded by the model's own loaders each time: %r", len(forms), error)
            self._unplanned.add(frozenset(forms))
            return None
        return recorder.plans


class _DoesMore(Exception):
    """A loader does something else than to copy."""


class _Recorder(TorchDispatchMode):
    """Writes copies and fills down and leaves them undone; lets views be made, and nothing else be done."""

    def __init__(self, stand_ins: dict[_Form, torch.Tensor]) -> None:
        super().__init__()
        self.plans = {form: _Plan([], []) for form in stand_ins}
        # A tensor without content has no address: it is known by its storage, which `stand_ins` keeps.
        self._forms = {one.untyped_storage()._cdata: form for form, one in stand_ins.items()}
        self._last: tuple[_Plan, int] | None = None  # what a copy was written into, and its storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args[:2])
        if func is torch.ops.aten.fill_.Scalar:
            return self._fill(*args)
        if func.is_view:
            return func(*args, **(kwargs or {}))
        raise _DoesMore(str(func))

    def _copy(self, place: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        form = self._forms.get(source.untyped_storage()._cdata)
        if form is None or source.shape != place.shape:
            raise _DoesMore("a copy of something else")
        self.plans[form].copies.append(_Copy(place, source.stride(), source.storage_offset()))
        self._last = self.plans[form], place.untyped_storage()._cdata
        return place

    def _fill(self, place: torch.Tensor, value: float) -> torch.Tensor:
        """Of the rest of a parameter, after the copy into it."""
        plan, storage = self._last or (None, 0)
        if plan is None or place.untyped_storage()._cdata != storage:
            raise _DoesMore("a fill by itself")
        if place.numel():
            plan.fills.append((place, value))
        return place


def _form(named: NamedTensor) -> _Form:
    name, tensor = named
    return name, tensor.shape, tensor.dtype


def _batches(weights: Iterable[NamedTensor], num_bytes: int) -> Iterator[list[NamedTensor]]:
    batch: list[NamedTensor] = []
    held = 0
    for named in weights:
        batch.append(named)
        held += named[1].nbytes
        if held >= num_bytes:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
