"""The tensors of a torch model under their checkpoint names, in any wrapper."""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch

from engines.checkpoint.names import clean
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
    first_names = _tied(model)
    names = defaultdict(list)
    for name in state:
        names[first_names.get(name, name)].append(name)
    # A hook of the state_dict may leave out any of a tensor's names, also the first.
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


def _tied(model: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each tied tensor, by its further names."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (before := first.setdefault(id(parameter), clean(name))) != clean(name):
            tied[clean(name)] = before
    return tied
