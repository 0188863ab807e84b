"""The tensors of a push, as parts that are first announced with names, dtypes and shapes, then sent.

A model, a mapping or a sequence is one part. An iterator may create its tensors lazily, so it becomes several parts,
and one part is held at a time.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from engines.announcement import CASTABLE
from engines.batches import batches
from engines.checkpoint.names import CheckpointNames, Ties, checkpoint_names, clean
from engines.errors import InvalidRequest
from engines.transfer.packing import NamedTensor
from engines.types import TensorMeta
from trainer_client.results import ServedWeights

Source: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[NamedTensor]

PART_BYTES = 1 << 30
"""Size at which a part of an iterator ends."""
_ADAPTERS = re.compile(r"\.(lora_[A-Za-z_]+|base_layer|ia3_l|ln_tuning_layers|hada_\w+|vera_\w+|oft_\w+)\.")
"""Names of PEFT's wrappers."""
_PARALLEL = torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel


@dataclass(frozen=True, slots=True, eq=False)
class NamedOnes:
    """A tensor with all its names, several if tied. `is_buffer` is False for parameters."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A tensor to send: its name in the trainer, the dtype that is sent, and the checkpoint's names."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    names: CheckpointNames = field(default_factory=CheckpointNames)

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def forms(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the checkpoint's tensors in it, by name. Raises `InvalidRequest` where it has none of them."""
        return self.names.forms(self.name, self.shape)

    def made(self) -> torch.Tensor:
        """Return the tensor in `dtype`."""
        tensor = self.tensor.detach()
        # torch takes a microsecond to find that there is nothing to cast: a chunk of experts has 300 tensors.
        return tensor if tensor.dtype is self.dtype else tensor.to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a push."""

    entries: Sequence[Entry]

    @property
    def announced(self) -> dict[str, object]:
        """The part in the form of /update_weights."""
        forms = [(name, shape, entry.dtype) for entry in self.entries for name, shape in entry.forms.items()]
        return {
            "names": [name for name, _, _ in forms],
            "dtype_names": [_name(dtype) for _, _, dtype in forms],
            "shapes": [list(shape) for _, shape, _ in forms],
        }

    @property
    def tensors(self) -> Iterator[NamedTensor]:
        """Yield each tensor, made when its turn comes."""
        for entry in self.entries:
            yield from entry.names.converted(entry.name, entry.made()).items()

    def wait_for_values(self) -> None:
        """Wait for the work that this thread has queued on GPUs, such as an optimizer's step or a copy to the host: the
        tensors are read on streams of other threads, which do not."""
        devices = {entry.tensor.device for entry in self.entries if entry.tensor.is_cuda}
        if torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def parts_of(source: Source, served: ServedWeights) -> Iterator[Part]:
    """Yield the parts in the served dtypes, else in their own. Raise `InvalidRequest` for other
    objects than whole tensors."""
    held = {tensor.name: tensor for tensor in served.tensors or ()}
    names = checkpoint_names(held, served.config, served.tied)
    sent: set[str] = set()
    ties, is_empty = Ties(names, _are_equal), True
    for part in filter(None, _parts(source)):
        is_empty = False
        entries = [
            Entry(name, _with_bytes(name, one.tensor), _sent_in(name, one.tensor, names, held), names)
            for one in part
            for name in _sent_under(one, names)
        ]
        yield Part([entry for entry in entries if _is_new(entry, ties, sent)])
    if is_empty:
        raise InvalidRequest("named_tensors is empty: an update needs at least one tensor", param="named_tensors")


def _is_new(entry: Entry, ties: Ties[Entry], sent: set[str]) -> bool:
    """Note the names under which it is sent. Return False for a tied tensor that has come under its other name.

    Raise `InvalidRequest` for a name that has come before, and for a tied tensor with other values.
    """
    if any(ties.has(name, entry.name, entry) for name in entry.forms):
        return False
    if twice := sent.intersection(entry.forms):
        raise InvalidRequest(
            f"named_tensors has two tensors named {min(twice)!r}: give each once", param="named_tensors"
        )
    sent.update(entry.forms)
    return True


def _are_equal(first: Entry, second: Entry) -> bool:
    """Return True for equal values in the dtype that is sent."""
    ours, others = first.tensor, second.tensor
    if ours is others:
        return True
    sent = ours.detach().to(first.dtype), others.detach().to(ours.device, first.dtype)
    return bool(ours.shape == others.shape and torch.equal(*sent))


def _parts(source: Source) -> Iterator[list[NamedOnes]]:
    if isinstance(source, torch.nn.Module):
        yield _model_tensors(source)
    elif isinstance(source, Iterator):
        yield from batches(map(_checked, source), lambda one: one.tensor.numel() * one.tensor.itemsize, PART_BYTES)
    elif not isinstance(source, Iterable):
        raise InvalidRequest(
            f"named_tensors is a {type(source).__name__}: give a torch.nn.Module, a mapping, or pairs of name and "
            "tensor",
            param="named_tensors",
        )
    else:
        yield _same_as_one([_checked(one) for one in (source.items() if isinstance(source, Mapping) else source)])


def _checked(named: Any) -> NamedOnes:
    match named:
        case (str() as name, tensor) if isinstance(tensor, torch.Tensor):
            return NamedOnes((clean(name),), tensor)
        case (str() as name, value):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise InvalidRequest(f"named_tensors has {name!r} as {kind}: give a torch.Tensor", param="named_tensors")
    raise InvalidRequest(
        f"named_tensors has {str(named)[:60]!r}: give a torch.nn.Module, a mapping, or pairs of name and tensor",
        param="named_tensors",
    )


def _same_as_one(part: list[NamedOnes]) -> list[NamedOnes]:
    """Merge tensors at one place in memory, such as tied weights of a state_dict, into one with several names."""
    names: dict[Any, list[str]] = defaultdict(list)
    for one in part:
        names[_place(one.tensor)] += one.names
    return [NamedOnes(tuple(names.pop(place)), one.tensor) for one in part if (place := _place(one.tensor)) in names]


def _place(tensor: torch.Tensor) -> Any:
    """Return what two tensors at one place have in common. Tensors without bytes here have no place."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _sent_under(one: NamedOnes, names: CheckpointNames) -> tuple[str, ...]:
    """Return its served names; a tied weight has one unless the served checkpoint has both.

    A parameter without a served name is kept, for the later check; a buffer need not be in a checkpoint.
    """
    served = tuple(name for name in one.names if names.has(name, list(one.tensor.shape)))
    is_buffer = one.is_buffer or names.lacks_buffer(one.names[0])
    return served or (() if is_buffer else one.names[:1])


def _with_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor. Raise `InvalidRequest` for a part of a tensor, and for one without the plain bytes that
    engines load."""
    if hasattr(tensor, "full_tensor"):
        raise InvalidRequest(
            f"named_tensors has {name!r} as a DTensor, a part of a tensor: have all ranks gather it with "
            "full_tensor(), and push from one (docs/trainer_client.md, Sharded models)",
            param="named_tensors",
        )
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        form = "on the meta device" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise InvalidRequest(
            f"named_tensors has {name!r} {form}: give a dense tensor with its values, such as of a model that is not "
            "offloaded",
            param="named_tensors",
        )
    return tensor


def _sent_in(
    name: str,
    tensor: torch.Tensor,
    names: CheckpointNames,
    held: Mapping[str, TensorMeta],
) -> torch.dtype:
    if _name(tensor.dtype) not in CASTABLE:
        return tensor.dtype
    into = next(iter(names.forms(name, list(tensor.shape))))
    served = held[into].dtype if into in held else ""
    return getattr(torch, served) if served in CASTABLE else tensor.dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_tensors(model: torch.nn.Module) -> list[NamedOnes]:
    """Return parameters and persistent buffers, in the model's order."""
    model = _unwrapped(model)
    state = {clean(name): one for name, one in model.state_dict(keep_vars=True).items() if torch.is_tensor(one)}
    if adapted := next(filter(_ADAPTERS.search, state), None):
        served = ", or serve the adapter with POST /v1/load_lora_adapter" if ".lora_" in adapted else ""
        raise InvalidRequest(
            f"the model has {adapted!r}, a part of a PEFT adapter: push the result of merge_and_unload(){served}",
            param="named_tensors",
        )
    buffers = {clean(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    names: dict[int, list[str]] = defaultdict(list)  # of one tensor, several where it is tied
    for name, one in state.items():
        names[id(one)].append(name)
    return [NamedOnes(tuple(group), state[group[0]], group[0] in buffers) for group in names.values()]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile, DistributedDataParallel and DataParallel have wrapped, in any order.

    Raise `InvalidRequest` for FSDP of the first generation, whose parameters are parts of flat ones.
    """
    while (inner := model.module if isinstance(model, _PARALLEL) else getattr(model, "_orig_mod", model)) is not model:
        model = inner
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InvalidRequest(
            "the model is of FSDP's first generation: call on all ranks get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), and push that from one",
            param="named_tensors",
        )
    return model
