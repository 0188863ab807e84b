"""Lets an engine start where another fills the GPU: its weights and KV cache get memory of their own when it wakes.

vLLM keeps both in memory that it can unmap from its addresses and map again (`--enable-sleep-mode`), since CUDA graphs
hold addresses alone. Until the engine sleeps, all its large parameters share one piece of memory, and all of its KV
cache another: the driver maps a piece at many addresses. A start reads and writes there, but needs no values. vLLM's
wake-up maps memory at the same addresses, into which weights are then loaded.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GRANULE = 2 << 20
_PIECE_BYTES = 64 << 20
_LARGE_BYTES = 16 << 20
"""A smaller tensor keeps its memory. torch gives those above 10 MiB a segment of their own."""
_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3  # of CUDA's driver
_NOTHING = ctypes.c_ulonglong(0)

Allocation = tuple[int, int, int, int]
"""As vLLM's allocator keeps it: device, bytes, address, and the address of the driver's handle."""


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, with its `allocFlags` as 8 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    if error := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"CUDA's driver answers {name} with error {error}")


def reserved(num_bytes: int) -> int:
    """Return the address of a range that has no memory yet."""
    address = ctypes.c_ulonglong()
    _call(
        "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0), _NOTHING, _NOTHING
    )
    return address.value


class Piece:
    """Memory of one GPU that is mapped at many addresses. The driver maps an allocation as a whole alone: there is a
    large one, and one of a granule for the rest of a range. 100 GB are mapped in 0.07 s (H200)."""

    def __init__(self, device: int) -> None:
        self._where = _Location(_DEVICE, device)
        self._handles = {num_bytes: self._created(num_bytes) for num_bytes in (_PIECE_BYTES, _GRANULE)}

    def map(self, address: int, num_bytes: int) -> None:
        """Map it again and again, until all of the reserved range has memory. `num_bytes` is of whole granules."""
        for begin, size in _parts(address, num_bytes):
            _call("cuMemMap", begin, ctypes.c_size_t(size), ctypes.c_size_t(0), self._handles[size], _NOTHING)
        access = ctypes.byref(_Access(self._where, _READ_AND_WRITE))
        _call("cuMemSetAccess", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes), access, ctypes.c_size_t(1))

    def unmap(self, address: int, num_bytes: int) -> None:
        for begin, size in _parts(address, num_bytes):
            _call("cuMemUnmap", begin, ctypes.c_size_t(size))

    def release(self) -> None:
        """Return the memory to the GPU. It is mapped nowhere."""
        for handle in self._handles.values():
            _call("cuMemRelease", handle)

    def _created(self, num_bytes: int) -> ctypes.c_ulonglong:
        handle, properties = ctypes.c_ulonglong(), _Properties(type=_PINNED, location=self._where)
        _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(num_bytes), ctypes.byref(properties), _NOTHING)
        return handle


def _parts(address: int, num_bytes: int) -> Iterator[tuple[ctypes.c_ulonglong, int]]:
    """Yield the addresses of a range at which an allocation is mapped, with its size."""
    at = 0
    while at < num_bytes:
        size = _PIECE_BYTES if num_bytes - at >= _PIECE_BYTES else _GRANULE
        yield ctypes.c_ulonglong(address + at), size
        at += size


class LeanMemory:
    """Replaces the memory of an allocator's large tensors by pieces until the allocator sleeps.

    allocator: vLLM's `CuMemAllocator`, of which a process has one; `record` makes its record of an allocation.
    create, release: its functions that map memory at an allocation's address, and unmap it.
    """

    def __init__(
        self,
        allocator: Any,
        record: Callable[[Allocation, str], Any],
        create: Callable[..., None],
        release: Callable[..., None],
    ) -> None:
        self._allocator = allocator
        self._record = record
        self._create = create
        self._release = release
        self._handles: list[ctypes.c_ulonglong] = []
        self._shared: dict[int, Piece] = {}
        self._pieces: dict[str, Piece] = {}
        self._has_ended = False

    def registered(self, _module: Any, _name: str, parameter: Any) -> None:
        """Share the memory of a module's new parameter if it is large, and alone in its segment."""
        if self._has_ended or parameter is None or not parameter.is_cuda:
            return
        storage = parameter.untyped_storage()
        address = storage.data_ptr()
        found = self._allocator.pointer_to_data.get(address)
        if found is None or found.tag != "weights" or address in self._shared:
            return
        if storage.nbytes() >= _LARGE_BYTES and found.handle[1] - storage.nbytes() < _GRANULE:
            self._release(*found.handle)
            self._share(found.handle, found.tag)

    def kv_cache(self, device: int, num_bytes: int) -> int:
        """Return the address of the KV cache, which never had memory of its own: vLLM takes it as one tensor."""
        handle = ctypes.c_ulonglong()  # where the allocator keeps the driver's handle once it wakes
        self._handles.append(handle)
        size = -(-num_bytes // _GRANULE) * _GRANULE
        allocation = device, size, reserved(size), ctypes.addressof(handle)
        self._allocator.pointer_to_data[allocation[2]] = self._record(allocation, "kv_cache")
        self._share(allocation, "kv_cache")
        return allocation[2]

    def freed(self, address: int) -> None:
        """Give an allocation memory of its own again, which the allocator returns to the GPU next."""
        if (piece := self._shared.pop(address, None)) is not None:
            handle = self._allocator.pointer_to_data[address].handle
            piece.unmap(address, handle[1])
            self._create(*handle)

    def end(self) -> None:
        """Leave all shared addresses without memory, as the allocator does when it sleeps."""
        for address, piece in self._shared.items():
            found = self._allocator.pointer_to_data[address]
            piece.unmap(address, found.handle[1])
            found.is_asleep = True
        for piece in self._pieces.values():
            piece.release()
        self._shared, self._pieces = {}, {}
        self._has_ended = True

    def _share(self, allocation: Allocation, tag: str) -> None:
        device, num_bytes, address, _ = allocation
        if tag not in self._pieces:
            self._pieces[tag] = Piece(device)
        self._pieces[tag].map(address, num_bytes)
        self._shared[address] = self._pieces[tag]


class KvCache(TorchFunctionMode):  # type: ignore[misc]
    """Has `torch.zeros` return large tensors of a GPU over addresses of `reserve`, given device and bytes."""

    def __init__(self, reserve: Callable[[int, int], int]) -> None:
        super().__init__()
        self._reserve = reserve

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        device = torch.device(named.get("device") or "cpu")
        if func is not torch.zeros or device.type != "cuda":
            return func(*args, **named)
        form = func(*args, **{**named, "device": "meta"})
        if form.nbytes <= _PIECE_BYTES:
            return func(*args, **named)
        index = torch.cuda.current_device() if device.index is None else device.index
        return over(self._reserve(index, form.nbytes), form.nbytes, device).view(form.dtype).view(form.shape)


def over(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return bytes of a GPU that torch does not own."""

    class Bytes:
        __cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|i1", "data": (address, False), "version": 3}  # noqa: RUF012

    return torch.as_tensor(Bytes(), device=device)


def start_lean() -> None:
    """Have this process of vLLM (0.32) start with lean memory, if it has a GPU."""
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from vllm.device_allocator import cumem

    if cumem.cumem_available:
        cumem.CuMemAllocator = _allocator_of(cumem)
        register_module_parameter_registration_hook(_registered)


def _registered(*told: Any) -> None:
    from vllm.device_allocator import cumem

    cumem.CuMemAllocator.get_instance().lean.registered(*told)


def _allocator_of(cumem: Any) -> Any:
    class LeanAllocator(cumem.CuMemAllocator):  # type: ignore[misc]
        """vLLM's allocator, lean until it sleeps for the first time."""

        @cached_property
        def lean(self) -> LeanMemory:
            return LeanMemory(self, cumem.AllocationData, cumem.python_create_and_map, cumem.python_unmap_and_release)

        @contextmanager
        def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
            with super().use_memory_pool(tag), KvCache(self.lean.kv_cache) if tag == "kv_cache" else nullcontext():
                yield

        def _python_free_callback(self, ptr: int) -> Any:
            self.lean.freed(ptr)
            return super()._python_free_callback(ptr)

        def sleep(self, offload_tags: Any = None) -> None:
            self.lean.end()
            super().sleep(offload_tags)

    return LeanAllocator
