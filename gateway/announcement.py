"""Does what a trainer is about to send fit the served model? Asked before anything is overwritten."""

from collections.abc import Mapping
from typing import Any

from engines.errors import InvalidRequest
from engines.types import ReplicaInfo


def check_tensors(announced: Mapping[str, Any], served: ReplicaInfo, param: str) -> None:
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
        # Engines cast between floats; integers are codes of a quantisation, or another tensor.
        if _is_float(str(dtype)) != _is_float(expected[name].dtype):
            raise InvalidRequest(
                f"{param}.dtype_names gives {dtype!r} for {name!r}, model {served.model!r} has "
                f"{expected[name].dtype!r}",
                param=f"{param}.dtype_names",
            )


def _is_float(dtype: str) -> bool:
    return "float" in dtype
