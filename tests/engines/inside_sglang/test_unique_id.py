"""The NCCL id in the store of vLLM's trainer."""

import ctypes
import os
import pickle

import pytest

from engines.inside_sglang.nccl_group import unique_id_of


class NcclUniqueId(ctypes.Structure):
    """As vLLM's."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Trap:
    """Its pickle runs a command when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.abort, ()  # type: ignore[return-value]


@pytest.mark.parametrize("protocol", [3, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
def test_the_id_is_read_from_a_pickled_structure(protocol: int) -> None:
    own = NcclUniqueId()
    content = bytes(range(128))
    ctypes.memmove(ctypes.addressof(own), content, len(content))
    assert unique_id_of(pickle.dumps(own, protocol)) == content


def test_nothing_of_a_pickle_runs() -> None:
    with pytest.raises(ValueError, match="holds 0 NCCL ids"):
        unique_id_of(pickle.dumps(Trap()))


def test_two_ids_are_none() -> None:
    with pytest.raises(ValueError, match="holds 2 NCCL ids"):
        unique_id_of(pickle.dumps([bytes(128), bytes(127) + b"1"]))
