"""What a trainer gives to be pushed, as parts that are announced and then sent: names, dtypes and shapes come first.

A model, a mapping or a sequence is one part. An iterator may make its tensors as it goes, so it becomes several, and no
more of it is held at a time than one of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from engines.errors import InvalidRequest
from engines.gloo_transfer import NamedTensor

Source: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[NamedTensor]

PART_BYTES = 1 << 30
"""A part of an iterator is announced once it holds so much."""
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_DATA_PARALLEL = "module."


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor that is to be sent, under the name and in the dtype that it is sent in."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(self.tensor.numel() * self.dtype.itemsize)

    def made(self) -> torch.Tensor:
        """It, in that dtype."""
        return self.tensor.detach().to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tensors that are announced together."""

    entries: Sequence[Entry]
    on_sent: Callable[[Entry], None] = lambda _: None

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def announced(self) -> dict[str, object]:
        """As /update_weights has it."""
        return {
            "names": [entry.name for entry in self.entries],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in self.entries],
            "shapes": [list(entry.tensor.shape) for entry in self.entries],
        }

    @property
    def tensors(self) -> Iterator[NamedTensor]:
        """Each made when its turn comes."""
        for entry in self.entries:
            yield entry.name, entry.made()
            self.on_sent(entry)


def parts_of(source: Source, dtype: torch.dtype | None) -> Iterator[list[Entry]]:
    """The tensors of `source`, in `dtype` or each in its own. Raises `InvalidRequest` where it is no source."""
    if isinstance(source, torch.nn.Module):
        named: Iterable[NamedTensor] = _parameters(source)
    else:
        named = source.items() if isinstance(source, Mapping) else source
    entries = (_entry(one, dtype) for one in named)
    if isinstance(source, Iterator):
        yield from _bounded(entries)
    elif whole := list(entries):
        yield whole


def _parameters(model: torch.nn.Module) -> Iterator[NamedTensor]:
    """Under the names that they have where nothing wraps the model. Tied ones come once."""
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            name = name.removeprefix(_DATA_PARALLEL)
        yield name, parameter


def _entry(named: Any, dtype: torch.dtype | None) -> Entry:
    match named:
        case (str() as name, torch.Tensor() as tensor):
            return Entry(name, tensor, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
    raise InvalidRequest(
        f"named_tensors has {str(named)[:60]!r}: give a torch.nn.Module, a mapping, or pairs of name and tensor",
        param="named_tensors",
    )


def _bounded(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    for entry in entries:
        part.append(entry)
        if sum(one.num_bytes for one in part) >= PART_BYTES:
            yield part
            part = []
    if part:
        yield part
