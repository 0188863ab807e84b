"""Lets an engine start where another fills the GPU: its weights and KV cache get memory of their own when it wakes.

vLLM keeps both in memory that it can unmap from its addresses and map again (`--enable-sleep-mode`), since CUDA graphs
hold addresses alone. Until the engine sleeps, all its large parameters share one piece of memory, and all of its KV
cache another: the driver maps a piece at many addresses. A start reads and writes there, but needs no values. vLLM's
wake-up maps memory at the same addresses, into which weights are then loaded.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

_PIECE_BYTES = 64 << 20  # 2,000 pieces for the KV cache of a large GPU; the driver maps thousands in a second
_LARGE_BYTES = 16 << 20
"""A smaller tensor keeps its memory. torch gives those above 10 MiB a segment of their own."""
_GRANULE = 2 << 20
_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3  # of CUDA's driver
_NO_FLAGS = ctypes.c_ulonglong(0)


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


class Piece:
    """Memory of one GPU that is mapped at many addresses. The driver maps an allocation as a whole alone: there is a
    large one, and one of a granule for the rest of a range."""

    def __init__(self, device: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._where = _Location(_DEVICE, device)
        self._handles = {num_bytes: self._created(num_bytes) for num_bytes in (_PIECE_BYTES, _GRANULE)}

    def map(self, address: int, num_bytes: int) -> None:
        """Map it again and again, until all of the reserved range has memory. `num_bytes` is of whole granules."""
        for begin, size in _parts(address, num_bytes):
            self._call("cuMemMap", begin, ctypes.c_size_t(size), ctypes.c_size_t(0), self._handles[size], _NO_FLAGS)
        access = ctypes.byref(_Access(self._where, _READ_AND_WRITE))
        whole = (ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))
        self._call("cuMemSetAccess", *whole, access, ctypes.c_size_t(1))

    def unmap(self, address: int, num_bytes: int) -> None:
        for begin, size in _parts(address, num_bytes):
            self._call("cuMemUnmap", begin, ctypes.c_size_t(size))

    def release(self) -> None:
        """Return the memory to the GPU. It is mapped nowhere."""
        for handle in self._handles.values():
            self._call("cuMemRelease", handle)

    def _created(self, num_bytes: int) -> ctypes.c_ulonglong:
        handle, properties = ctypes.c_ulonglong(), _Properties(type=_PINNED, location=self._where)
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), _NO_FLAGS)
        return handle

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"CUDA's driver answers {name} with error {error}")


def _parts(address: int, num_bytes: int) -> Iterator[tuple[ctypes.c_ulonglong, int]]:
    """Yield the addresses of a range at which an allocation is mapped, with its size."""
    at = 0
    while at < num_bytes:
        size = _PIECE_BYTES if num_bytes - at >= _PIECE_BYTES else _GRANULE
        yield ctypes.c_ulonglong(address + at), size
        at += size


class LeanMemory:
    """Replaces the memory of an allocator's large tensors by pieces until the allocator sleeps.

    allocator: vLLM's `CuMemAllocator`, of which a process has one. An allocation is a tuple of device, bytes, address,
    and the place of its driver's handle.
    """

    def __init__(self, allocator: Any, create: Callable[..., None], release: Callable[..., None]) -> None:
        self._allocator = allocator
        self._create = create
        self._release = release
        self._shared: dict[int, Piece] = {}
        self._pieces: dict[str, Piece] = {}
        self._has_ended = False

    def allocated(self, allocation: tuple[int, int, int, int], tag: str) -> None:
        if tag == "kv_cache" and allocation[1] > _PIECE_BYTES:
            self._share(allocation, tag)

    def registered(self, _module: Any, _name: str, parameter: Any) -> None:
        """Share the memory of a module's new parameter if it is large, and alone in its segment."""
        if parameter is None or not parameter.is_cuda:
            return
        storage = parameter.untyped_storage()
        found = self._allocator.pointer_to_data.get(storage.data_ptr())
        if found is None or found.tag != "weights" or storage.data_ptr() in self._shared:
            return
        if storage.nbytes() >= _LARGE_BYTES and found.handle[1] - storage.nbytes() < _GRANULE:
            self._share(found.handle, found.tag)

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

    def _share(self, allocation: tuple[int, int, int, int], tag: str) -> None:
        if self._has_ended:
            return
        device, num_bytes, address, _ = allocation
        if tag not in self._pieces:
            self._pieces[tag] = Piece(device)
        self._release(*allocation)
        self._pieces[tag].map(address, num_bytes)
        self._shared[address] = self._pieces[tag]


def start_lean() -> None:
    """Have this process of vLLM (0.32) start with lean memory, if it has a GPU."""
    from vllm.device_allocator import cumem

    if not cumem.cumem_available:
        return
    from torch.nn.modules.module import register_module_parameter_registration_hook

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
            return LeanMemory(self, cumem.python_create_and_map, cumem.python_unmap_and_release)

        def _python_malloc_callback(self, allocation_handle: Any) -> None:
            super()._python_malloc_callback(allocation_handle)
            self.lean.allocated(allocation_handle, self.current_tag)

        def _python_free_callback(self, ptr: int) -> Any:
            self.lean.freed(ptr)
            return super()._python_free_callback(ptr)

        def sleep(self, offload_tags: Any = None) -> None:
            self.lean.end()
            super().sleep(offload_tags)

    return LeanAllocator
