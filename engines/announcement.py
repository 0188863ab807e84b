"""Does what a trainer is about to send fit the served model? Asked before anything is overwritten."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from engines.errors import InvalidRequest
from engines.types import TensorMeta

CASTABLE = ("float64", "float32", "float16", "bfloat16")
"""What engines cast into each other. Integers and 8-bit floats are codes of a quantisation."""

_FUSED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
_FUSED = {part: parts[0] for parts in _FUSED_TOGETHER for part in parts}


class Served(Protocol):
    """A model that is served; `tensors` is None where its checkpoint cannot be read."""

    @property
    def model(self) -> str: ...

    @property
    def tensors(self) -> Sequence[TensorMeta] | None: ...


def check_tensors(announced: Mapping[str, Any], served: Served, param: str) -> None:
    """Raises `InvalidRequest`, which names the tensor, where a name or shape is not the served model's.

    `announced` holds names, dtype_names and shapes as /update_weights has them; `param` is where the trainer said so.
    """
    names, shapes = announced.get("names"), announced.get("shapes")
    if not (isinstance(names, list) and isinstance(shapes, list) and len(names) == len(shapes)):
        raise InvalidRequest(f"{param} needs names and shapes, lists of equal length", param=param)
    if served.tensors is None:
        return
    expected = {tensor.name: tensor for tensor in served.tensors}
    for name, shape in zip(names, shapes, strict=True):
        if name not in expected:
            raise InvalidRequest(
                f"{param}.names has {name!r}, which model {served.model!r} does not have: send the tensors of the "
                "served model under their checkpoint names",
                param=f"{param}.names",
            )
        if list(shape) != list(expected[name].shape):
            raise InvalidRequest(
                f"{param}.shapes gives {list(shape)} for {name!r}, model {served.model!r} has "
                f"{list(expected[name].shape)}",
                param=f"{param}.shapes",
            )
    for name, dtype in zip(names, announced.get("dtype_names") or (), strict=False):
        if not _fits(str(dtype), expected[name].dtype):
            raise InvalidRequest(
                f"{param}.dtype_names gives {dtype!r} for {name!r}, model {served.model!r} has "
                f"{expected[name].dtype!r}",
                param=f"{param}.dtype_names",
            )


def check_fused(names: Collection[str], served: Served) -> None:
    """Raises `InvalidRequest` where an update has some of the tensors that vLLM holds in one, and not the others.

    Its reload begins such a tensor anew, and leaves what does not come as it finds it in memory.
    """
    received = frozenset(names)
    absent = defaultdict(list)
    for tensor in served.tensors or ():
        if tensor.name not in received:
            absent[_fused_into(tensor.name)].append(tensor.name)
    for name in names if absent else ():
        if missing := absent.get(_fused_into(name)):
            raise InvalidRequest(
                f"the update has {name!r} and not {min(missing)!r}, which vLLM holds together: send both, or push "
                "through the store, which takes any",
                param="update_info.names",
            )


def _fused_into(name: str) -> str:
    """What vLLM makes of a tensor: those that become one have one name here, as have weight and bias of a layer."""
    if ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    module, _, _ = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    return f"{parent}.{_FUSED.get(own, own)}"


def _fits(dtype: str, expected: str) -> bool:
    return dtype == expected or (dtype in CASTABLE and expected in CASTABLE)
