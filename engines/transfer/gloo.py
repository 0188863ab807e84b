"""Weights over gloo, for hosts without NCCL: the group of trainer and engines.

Both ends use this file: `trainer_client/trl.py` sends, `engines/inside_vllm/gloo_receiver.py` receives. A blocked
gloo operation cannot be cancelled. So the sender enters a broadcast only after every receiver has announced itself in
the torch store: before that the wait can be cancelled, and after it a death closes a socket.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engines.errors import WeightUpdateFailed
from engines.transfer.packing import CHUNK_BYTES, Announced, NamedTensor, chunks, num_bytes, packed, unpacked_as

TIMEOUT_S = 300.0
"""Limit on the rendezvous and on the broadcast of one chunk, as in vLLM's rendezvous."""
LISTENS_S = 20.0
"""Longest wait for the trainer's listener. Our trainers open it before they have engines called; TRL opens it beside
its call. A trainer that has died never listens, and an engine makes no token while it waits."""
POLL_S = 0.002
_LOOK_S = 0.05
SENDER_RANK = 0

Load = Callable[[list[NamedTensor]], object]


class Group(Protocol):
    """The receiving end of a trainer's group, over gloo or NCCL."""

    def join(self) -> None: ...

    def receive(
        self, announced: Iterable[Announced], load: Load, chunk_bytes: int = ..., timeout_s: float = ...
    ) -> None: ...

    def close(self, reason: str = ...) -> None: ...


class Receiver:
    """The place of one receiver in the group of its trainer. On any error it is left, which frees the trainer."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._chunk_bytes = CHUNK_BYTES

    def join(self, group: Group, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Join a group. Any earlier group is left first, so a new trainer may come at any time."""
        self.leave("a trainer opened a new group")
        group.join()
        self._group, self._chunk_bytes = group, chunk_bytes

    def receive(self, update_info: Mapping[str, Any], load: Load, timeout_s: float = 0.0) -> None:
        """Receive and load all tensors announced."""
        if self._group is None:
            raise WeightUpdateFailed("no weight group: call init_weight_transfer_engine first")
        dtypes = [getattr(torch, name) for name in update_info["dtype_names"]]
        announced = list(zip(update_info["names"], dtypes, update_info["shapes"], strict=True))
        try:
            self._group.receive(announced, load, self._chunk_bytes, timeout_s)
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def leave(self, reason: str = "closed the group") -> None:
        """Leave the group, if any, also from another thread than that of a receive, which ends."""
        group, self._group = self._group, None
        if group is not None:
            group.close(reason)


class WeightGroup:
    """One trainer (rank 0) and all workers of all engines. The first failure breaks the group for good."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        """`address` and `port` are the trainer's listener: `listen` opens it, `join` connects."""
        self.rank = rank
        self.world_size = world_size
        self._address = address
        self._port = port
        self._timeout_s = timeout_s
        self._given_up = threading.Event()
        self._reason = ""
        self._num_broadcasts = 0
        self._store: dist.TCPStore | None = None
        self._gloo: dist.ProcessGroupGloo | None = None

    def listen(self) -> None:
        """Open the sender's listener, which is to be done before receivers are called to join."""
        with self._joining():
            self._store = self._open_store()

    def join(self) -> None:
        """Wait for all ranks and connect. Raises WeightUpdateFailed after `timeout_s` or `give_up`, and at a receiver
        whose sender does not listen."""
        with self._joining():
            if self._store is None:
                self._store = self._open_store()
            self._store.add("joined", 1)
            self._wait_for_all(self._store, "joined", "for all ranks to join")
            self._gloo = self._connect()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` (contiguous, on CPU) on all receivers; WeightUpdateFailed after `timeout_s` or `give_up`."""
        gloo, store = self._gloo, self._store  # another thread may close the group meanwhile
        if gloo is None or store is None:
            raise WeightUpdateFailed(self._reason or "the weight group is not joined")
        self._num_broadcasts += 1
        ready = f"ready/{self._num_broadcasts}"
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            self._agree_on_size(store, tensor.nbytes)
            store.add(ready, 1)
            if self.rank == SENDER_RANK:
                self._wait_for_all(store, ready, "for all ranks to receive")
            gloo.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise self._broken(f"rank {self.rank} of {self.world_size} lost the group: {error}") from error

    def send(self, tensors: Iterator[NamedTensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        """Broadcast `tensors` in order, packed as bytes. Receivers must know names, dtypes and shapes."""
        for chunk in packed(((name, tensor.cpu()) for name, tensor in tensors), chunk_bytes):
            self.broadcast(chunk)

    def receive(
        self, announced: Iterable[Announced], load: Load, chunk_bytes: int = CHUNK_BYTES, timeout_s: float = 0.0
    ) -> None:
        """Receive the tensors of `send`, and pass each chunk to `load`. Each has the group's own limit."""
        for chunk in chunks(announced, chunk_bytes):
            content = torch.empty(sum(map(num_bytes, chunk)), dtype=torch.uint8)
            self.broadcast(content)
            load(unpacked_as(chunk, content))

    def give_up(self, reason: str) -> None:
        """From another thread: make waits in this group raise WeightUpdateFailed with `reason`."""
        self._reason = self._reason or reason
        self._given_up.set()

    def close(self, reason: str = "closed the group") -> None:
        """Leave and publish the reason, so that peers blocked on us get an error now. May be called twice."""
        self.give_up(reason)
        store, self._store = self._store, None  # another thread may close the group meanwhile
        if store is not None:
            # The store ends with the sender. The first to leave has the reason of those after it.
            with contextlib.suppress(RuntimeError):
                store.compare_set("left", "", f"rank {self.rank}: {reason}")
        # gloo closes its sockets only in its destructor; shutdown() and abort() leave peers waiting.
        self._gloo = None

    def _broken(self, what: str) -> WeightUpdateFailed:
        self._reason = f"{what}; {self._reason}" if self._reason else what
        self.close(what)
        return WeightUpdateFailed(self._reason)

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._broken(
                f"rank {self.rank} of {self.world_size} could not join at {self._address}:{self._port}: {error}"
            ) from error

    def _open_store(self) -> dist.TCPStore:
        if self.rank != SENDER_RANK:  # the store's own wait is over late: twice its limit, and more
            until_listening(self._address, self._port, self._timeout_s)
        store = dist.TCPStore(
            self._address,
            self._port,
            self.world_size,
            is_master=self.rank == SENDER_RANK,
            timeout=timedelta(seconds=min(self._timeout_s, LISTENS_S)),
            wait_for_workers=False,
        )
        store.set_timeout(timedelta(seconds=self._timeout_s))
        return store

    def _agree_on_size(self, store: dist.TCPStore, num_bytes: int) -> None:
        """Compare sizes first: gloo ends the process if it receives too much, and ignores a shortfall."""
        key = f"bytes/{self._num_broadcasts}"
        if self.rank == SENDER_RANK:
            store.set(key, str(num_bytes))
            return
        # Polled, since no other thread could leave the group under a call of the store that waits.
        self._wait(store, lambda: store.check([key]), lambda: "for the sender")
        if (sent := int(store.get(key))) != num_bytes:
            raise RuntimeError(f"{num_bytes} bytes were announced, but the sender sends {sent}")

    def _wait_for_all(self, store: dist.TCPStore, counter: str, purpose: str) -> None:
        """Return when all ranks have incremented `counter`."""

        def there() -> int:
            return int(store.add(counter, 0))

        self._wait(store, lambda: there() >= self.world_size, lambda: f"{purpose}: {there()} of {self.world_size} did")

    def _wait(self, store: dist.TCPStore, is_done: Callable[[], bool], purpose: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not is_done():
            if store.check(["left"]):
                raise RuntimeError(f"a rank left: {store.get('left').decode()}")
            if self._given_up.is_set():
                raise RuntimeError("the wait was cancelled")
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {self._timeout_s:g} s {purpose()}")
            time.sleep(POLL_S)

    def _connect(self) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        options._threads = 1
        # By default gloo resolves this machine's name, which may fail in a container.
        own = address_towards(self._address, self._port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), self.rank, self.world_size, options)


def until_listening(address: str, port: int, timeout_s: float = math.inf) -> None:
    """Return once the trainer listens, before a rendezvous that no other thread can end.

    Raise `RuntimeError` after `LISTENS_S`, or `timeout_s` if that is shorter.
    """
    limit_s = min(timeout_s, LISTENS_S)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((address, port), limit_s).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the trainer does not listen at {address}:{port} ({error}): it has died, or is out of reach"
                ) from error
        time.sleep(_LOOK_S)


def group_info(address: str, port: int, world_size: int) -> dict[str, Any]:
    """Return the trainer's group for /init_weight_transfer_engine."""
    place = {"master_address": address, "master_port": port}
    return place | {"rank_offset": SENDER_RANK + 1, "world_size": world_size, "packed": True}


def address_towards(host: str, port: int) -> str:
    """Return our address on the route to `host`. Sends nothing."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
