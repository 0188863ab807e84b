"""The check that announced tensors fit the served model, made before anything is overwritten."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from engines.errors import InvalidRequest
from engines.types import TensorMeta

CASTABLE = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that engines cast into each other. Integers and 8-bit floats are quantisation codes."""

_FUSED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
_LEFT_ALONE = ".e_score_correction_bias"  # by vLLM's reload (its SKIP_TENSORS); a buffer, which TRL does not send
_FUSED = {part: parts[0] for parts in _FUSED_TOGETHER for part in parts}


class Served(Protocol):
    """A served model; `tensors` is None if its checkpoint cannot be read."""

    @property
    def model(self) -> str: ...

    @property
    def tensors(self) -> Sequence[TensorMeta] | None: ...


def check_tensors(announced: Mapping[str, Any], served: Served, param: str) -> None:
    """Raise `InvalidRequest` naming the tensor if a name, shape or dtype does not fit the served model.

    `announced` holds names, dtype_names and shapes as in /update_weights; `param` is their field in the request.
    """
    check_form(announced, param)
    if served.tensors is None:
        return
    expected = {tensor.name: tensor for tensor in served.tensors}
    for name, shape in zip(announced["names"], announced["shapes"], strict=True):
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
    for name, dtype in zip(announced["names"], announced.get("dtype_names") or (), strict=False):
        if not _fits(dtype, expected[name].dtype):
            raise InvalidRequest(
                f"{param}.dtype_names gives {dtype!r} for {name!r}, model {served.model!r} has "
                f"{expected[name].dtype!r}",
                param=f"{param}.dtype_names",
            )


def check_form(announced: Mapping[str, Any], param: str) -> None:
    """Raise `InvalidRequest` unless names, shapes and dtypes are lists as /update_weights has them."""
    names, shapes, dtypes = (announced.get(field) for field in ("names", "shapes", "dtype_names"))
    if not (isinstance(names, list) and isinstance(shapes, list) and len(names) == len(shapes)):
        raise InvalidRequest(f"{param} needs names and shapes, lists of equal length", param=param)
    if not _are_strings(names) or not all(map(_is_shape, shapes)):
        raise InvalidRequest(f"{param} needs names that are strings and shapes that are lists of integers", param=param)
    if dtypes is not None and not (_are_strings(dtypes) and len(dtypes) == len(names)):
        raise InvalidRequest(
            f"{param}.dtype_names is {str(dtypes)[:80]}, not a list of a string for each name",
            param=f"{param}.dtype_names",
        )


def has_others(announced: Mapping[str, Any], served: Served) -> bool:
    """Return True where names are announced that the served checkpoint does not have, and a trainer's module may.

    Raise as `check_form` does."""
    check_form(announced, "update_info")
    return served.tensors is not None and not {*announced["names"]} <= {one.name for one in served.tensors}


def check_fused(names: Collection[str], served: Served) -> None:
    """Raise `InvalidRequest` if an update has only some of the tensors that vLLM fuses into one.

    vLLM's reload allocates the fused tensor again, and leaves missing parts uninitialised.
    """
    received = frozenset(names)
    absent = defaultdict(list)
    for tensor in served.tensors or ():
        if tensor.name not in received and not tensor.name.endswith(_LEFT_ALONE):
            absent[_fused_into(tensor.name)].append(tensor.name)
    for name in names if absent else ():
        if missing := absent.get(_fused_into(name)):
            raise InvalidRequest(
                f"the update has {name!r} without {min(missing)!r}, and vLLM fuses the two: send both, or push "
                "through the store, which takes any subset",
                param="update_info.names",
            )


def _are_strings(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(type(length) is int for length in shape)


def _fused_into(name: str) -> str:
    """Return the name of the fused tensor that vLLM makes; weight and bias of a layer share a name."""
    if ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    module, _, _ = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    return f"{parent}.{_FUSED.get(own, own)}"


def _fits(dtype: str, expected: str) -> bool:
    return dtype == expected or (dtype in CASTABLE and expected in CASTABLE)
