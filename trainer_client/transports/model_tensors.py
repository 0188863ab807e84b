"""The tensors of a torch model under their checkpoint names, for any wrapper or sharding.

FSDP, FSDP2 and tensor-parallel models give sharded tensors: DTensor, and FSDP's ShardedTensor. The import loads only
torch; torch.distributed is used only if the trainer has loaded it.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engines.checkpoint_names import clean
from engines.errors import InvalidRequest

_ADAPTERS = re.compile(r"\.(lora_[A-Za-z_]+|base_layer|ia3_l|ln_tuning_layers|hada_\w+|vera_\w+|oft_\w+)\.")
"""Names of PEFT's wrappers."""
_PARALLEL = torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel


@dataclass(frozen=True, slots=True, eq=False)
class NamedOnes:
    """A tensor with all its names, several if tied. `is_buffer` is False for parameters."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_buffer: bool = False


def model_tensors(model: torch.nn.Module) -> list[NamedOnes]:
    """Return parameters and persistent buffers, in the model's order. A collective call if the model is sharded."""
    model = _unwrapped(model)
    state = _state(model)
    if adapted := next(filter(_ADAPTERS.search, state), None):
        served = ", or serve the adapter with POST /v1/load_lora_adapter" if ".lora_" in adapted else ""
        raise InvalidRequest(
            f"the model has {adapted!r}, a part of a PEFT adapter: push the result of merge_and_unload(){served}",
            param="named_tensors",
        )
    buffers = {clean(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    first_names = _tied(model)
    names = defaultdict(list)
    for name in state:
        names[first_names.get(name, name)].append(name)
    # A hook of the state_dict may leave out any of a tensor's names, also the first.
    return [NamedOnes(tuple(group), state[group[0]], group[0] in buffers) for group in names.values()]


def data_parallel_ranks(model: torch.nn.Module) -> set[int]:
    """Return the ranks of a DistributedDataParallel or FSDP1 model, also those of copies; none for other models."""
    model = _without_compiler(model)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return set(torch.distributed.get_process_group_ranks(model.process_group))
    return {rank for unit in _fsdp_units(model) for rank in _ranks_of_unit(unit)}


def _ranks_of_unit(unit: Any) -> Iterator[int]:
    """Yield the ranks of an FSDP1 unit. The ranks of another copy are as far from each other as this copy's."""
    here = torch.distributed.get_rank()
    among_copies = getattr(unit, "_inter_node_pg", None)
    for copy in torch.distributed.get_process_group_ranks(among_copies) if among_copies is not None else [here]:
        for rank in torch.distributed.get_process_group_ranks(unit.process_group):
            yield copy + rank - here


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile, DistributedDataParallel and DataParallel have wrapped, in any order."""
    while (inner := model.module if isinstance(model, _PARALLEL) else _without_compiler(model)) is not model:
        model = inner
    return model


def _without_compiler(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile has wrapped, as accelerate does with a DistributedDataParallel."""
    return getattr(model, "_orig_mod", model)


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    if _fsdp_units(model):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = get_model_state_dict(model)
    else:
        # FSDP2 reshards for state_dict; named_parameters() may show tensors gathered by a forward pass.
        state = model.state_dict(keep_vars=True)
    return {clean(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _tied(model: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each tied tensor, by its further names."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (before := first.setdefault(id(parameter), clean(name))) != clean(name):
            tied[clean(name)] = before
    return tied | dict(_tied_in_units(model))


def _tied_in_units(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield ties inside FSDP1 units, whose flat parameter records shared parameters."""
    paths = {id(module): clean(f"{path}.") for path, module in model.named_modules()}
    for unit in _fsdp_units(model):
        flat = unit._handle and unit._handle.flat_param
        for name, module, _, first_name, first_module, _ in flat._shared_param_infos if flat is not None else ():
            yield paths[id(module)].lstrip(".") + name, paths[id(first_module)].lstrip(".") + first_name


def _fsdp_units(model: torch.nn.Module) -> list[Any]:
    """Return the FSDP1 units; none if the trainer has not started torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel

    return list(FullyShardedDataParallel.fsdp_modules(model))


def is_sharded(tensor: Any) -> bool:
    """Return True if the tensor must be gathered from ranks."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "local_shards")


def holders_of(tensor: Any) -> tuple[int, ...]:
    """Return the ranks that hold its shards."""
    if hasattr(tensor, "full_tensor"):
        return tuple(tensor.device_mesh.mesh.flatten().tolist())
    return tuple(torch.distributed.get_process_group_ranks(tensor._process_group))


def ranks_of(tensor: Any) -> tuple[int, ...]:
    """Return the ranks of the trainer that holds it.

    A mesh may be a part of another. The other's ranks hold copies of the tensor, or other stages of a pipeline.
    """
    if hasattr(tensor, "full_tensor"):
        return tuple(_root_of(tensor.device_mesh).mesh.flatten().tolist())
    return holders_of(tensor)


def placed(tensor: Any) -> str:
    """Return how its shards are placed, alike on all ranks."""
    return str(getattr(tensor, "placements", ""))


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def shape_of(tensor: Any) -> list[int]:
    """Return the shape of the whole tensor."""
    return list(tensor.size())


def parts_here(tensor: Any) -> list[torch.Tensor]:
    """Return this process's shards."""
    if hasattr(tensor, "full_tensor"):
        return [tensor.to_local()]
    return [shard.tensor for shard in tensor.local_shards()] if is_sharded(tensor) else [tensor]


def gathered(tensor: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Gather the whole tensor in `dtype`: a DTensor on every rank, a ShardedTensor on the first, None on the others.

    Each rank casts its shard first: this halves the traffic of a float32 trainer that sends bfloat16.
    """
    if hasattr(tensor, "full_tensor"):
        part = tensor.detach().to(dtype)
        if part.device.type != part.device_mesh.device_type:
            part = part.to(part.device_mesh.device_type)  # offloaded to the host, where there is no group
        return part.full_tensor()
    return _sent_to_the_first(tensor, dtype)


def _sent_to_the_first(tensor: Any, dtype: torch.dtype) -> torch.Tensor | None:
    whole = None
    if torch.distributed.get_rank(tensor._process_group) == 0:
        whole = torch.empty(tensor.size(), dtype=dtype, device=tensor._get_preferred_device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: deprecated class, rank without a shard
        tensor.gather(0, whole, dtype=dtype)
    return whole
