"""The fleet's weight versions in the store. Its calls run in threads, and its failures fail no update.

Where there is no store, or it has no room, the fleet goes on without one, and `report` has the reason.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import structlog

from engines.checkpoint.folder import stored_bytes
from engines.engine import Json
from engines.errors import InvalidRequest, StoreFailed
from engines.store.draft import complete, is_whole
from engines.store.manifest import Manifest, check_bytes
from engines.store.weight_store import WeightStore, note_record, record_in, remove_folder
from engines.types import ReplicaState
from engines.weight_label import version_of
from gateway.config.schema import WeightsConfig
from gateway.fleet.concurrency import to_its_end
from gateway.fleet.replica import Replica

log = structlog.get_logger()

T = TypeVar("T")

AUTO = "auto"
_POLL_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
_COPIES = 2
"""The served version, and the draft of the next."""


class Snapshots:
    """The store of one gateway. `checkpoint` returns the folder of version 0, once engines have downloaded it."""

    def __init__(self, config: WeightsConfig, app: str, checkpoint: Callable[[], Path | None]) -> None:
        self._config = config
        self._folder = None if config.store is None else in_memory(app) if config.store == AUTO else Path(config.store)
        self._checkpoint = checkpoint
        self._store: WeightStore | None = None
        self._why_not = "weights.store is null" if config.store is None else "not open yet"
        self._keeping: asyncio.Task[None] | None = None
        self._removing: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Open the store, or note the reason to go without one."""
        if self._folder is None:
            return
        try:
            self._store = await self.in_thread(WeightStore, self._folder)
            checkpoint = await self.in_thread(self._checkpoint)
            await self._has_room(await self.in_thread(stored_bytes, checkpoint) if checkpoint else 0)
        except (StoreFailed, ValueError) as error:
            self._go_without(str(error))

    async def close(self) -> None:
        """Remove drafts and free the folder. A store that does not answer within a control call is left as it is."""
        try:
            async with asyncio.timeout(self._config.control_timeout_s):
                if self._keeping is not None:
                    self._keeping.cancel()
                    await asyncio.gather(self._keeping, return_exceptions=True)
                await self.removed()
                if self._store is not None:
                    await self.in_thread(self._store.close)
        except (StoreFailed, TimeoutError) as error:
            log.error("the weight store is left as it is", error=str(error) or "it does not answer")

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when there is a new version to load."""
        self._listeners.append(listener)

    def report(self) -> Json:
        """The store's part of `status`; `reason` is empty where versions are kept."""
        return {
            "folder": str(self._folder) if self._folder else None,
            "versions": self.versions,
            "reason": self._why_not,
        }

    @property
    def versions(self) -> list[int]:
        """The versions that can be loaded."""
        return self._store.versions if self._store else []

    @property
    def folder(self) -> Path:
        """Where trainers write drafts. Raises `StoreFailed` where there is no store."""
        return self._open_store().folder

    def base(self, version: int) -> str:
        """The folder of a version, from which missing tensors of the next are copied; "" where there is none."""
        if version == 0:
            return str(self._checkpoint() or "")
        return str(self._store.path(version)) if self._store and self._store.has(version) else ""

    async def draft(self, served: int | None, num_bytes: int) -> Path | None:
        """A folder for the next version of about `num_bytes`; None where the fleet goes on without it."""
        if self._store is None:
            return None
        try:
            return await self.claim(served, num_bytes)
        except StoreFailed as error:
            log.warning("no snapshot", reason=str(error))
            return None

    async def claim(self, served: int | None, num_bytes: int) -> Path:
        """As `draft`, where replicas get the version from the store alone. Raises `StoreFailed`."""
        await self._kept()
        await self.make_room(served)
        if not await self._has_room(num_bytes):
            raise StoreFailed(self._why_not)
        claiming = asyncio.ensure_future(self.in_thread(self._open_store().draft))
        try:
            return await to_its_end(claiming)
        except asyncio.CancelledError:  # the trainer has left, and nobody else knows the draft
            await self.discard(claiming.result())
            raise

    async def _kept(self) -> None:
        """Return once the committed version is written. Raise `StoreFailed` where that takes too long."""
        if self._keeping is not None:
            await asyncio.wait([self._keeping], timeout=self._config.store_wait_s)
            if not self._keeping.done():
                raise StoreFailed("the version before is still being written (weights.store_wait_s)")

    async def in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a call that reads or writes the store. Raise `StoreFailed` where its file system fails or hangs."""
        timeout_s = self._config.load_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(call, *arguments)
        except TimeoutError as error:
            raise StoreFailed(f"the weight store did not answer within {timeout_s:g} s") from error
        except OSError as error:
            raise StoreFailed(f"the weight store failed: {error}") from error

    async def make_room(self, served: int | None) -> None:
        """Keep the served version alone, all where it is None, beside the next. Make a folder that is gone again.

        Returns once older versions are removed, which takes a second for some GB.
        """
        await self.removed()
        if self._store is not None:
            if not await self.in_thread(self._store.folder.is_dir):  # systemd empties /dev/shm at a user's last logout
                gone, self._store = self._store, await self.in_thread(WeightStore, self._store.folder)
                await self.in_thread(gone.close)
            await self.in_thread(self._store.sweep)  # first, or it would remove what is pruned, and wait for that
            if served is not None:
                await self._prune(served)
            await self.removed()

    async def _prune(self, served: int) -> None:
        for folder in await self.in_thread(self._open_store().prune, served):
            self._remove(folder)

    async def discard(self, draft: Path | None) -> None:
        """Take a draft from its writer, which fails then, and remove it in the background."""
        if draft is not None and self._store is not None:
            await self._throw_away(self._store.throw_away, draft)

    async def removed(self) -> None:
        """Returns once discarded drafts are removed, at most after weights.store_wait_s."""
        if self._removing:
            await asyncio.wait(self._removing, timeout=self._config.store_wait_s)

    def _remove(self, folder: Path) -> None:
        """Remove a folder in the background: neither trainer nor replica waits for it."""
        removing = asyncio.create_task(self.in_thread(remove_folder, folder), name=f"remove {folder.name}")
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    def keep(self, draft: Path, label: str, scribe: Replica, digests: dict[str, str]) -> None:
        """In the background, wait until `scribe` has written the draft, and make it the version of this label.

        `digests` are those of the received tensors: the draft must have the same. It is given up with its scribe.
        """
        self._keeping = asyncio.create_task(
            self._keep(draft, label, scribe, digests), name=f"keep version {version_of(label)}"
        )

    async def announced(self, name: str) -> Json:
        """Check the bytes of a trainer's draft, and return names, dtypes and shapes. Raises `InvalidRequest` where it
        is missing or damaged."""
        draft = await self.in_thread(self._open_store().named, name)
        manifest = await self.in_thread(check_bytes, draft)
        return {
            "names": list(manifest.tensors),
            "dtype_names": [tensor.dtype for tensor in manifest.tensors.values()],
            "shapes": [tensor.shape for tensor in manifest.tensors.values()],
        }

    async def finished(self, draft: Path) -> Json:
        """As `announced`, for the relay's draft. Raises `StoreFailed` with the reason where the relay gave up."""
        if not await self.in_thread(is_whole, draft):
            raise StoreFailed(f"{draft} was not written to its end")
        try:
            return await self.announced(draft.name)
        except InvalidRequest as error:  # the relay's fault, not the trainer's
            raise StoreFailed(f"the draft differs from what was received: {error}") from error

    async def promote(self, draft: Path, label: str, served: int, names: Iterable[str]) -> Path:
        """Make a draft the version of this label, with missing tensors of `names` copied from version `served`.

        A cancelled call returns when the thread has ended: what it promoted can be withdrawn then. Where the thread
        does not end in time, it finds no draft to promote.
        """

        def completed() -> Path:
            base = self.base(served)
            complete(draft, Path(base) if base else None, list(names))
            return store.promote(draft, label, self._checkpoint())

        store = self._open_store()
        try:
            return await to_its_end(self.in_thread(completed))
        except BaseException:
            await self.discard(draft)
            raise

    async def withdraw(self, version: int) -> None:
        """Remove a version that is not served, as `discard` does a draft."""
        if self._store is not None:
            await self._throw_away(self._store.withdraw, version)

    async def _throw_away(self, call: Callable[..., Path], what: Path | int) -> None:
        """Remove what an update has left. A store that fails here hides no reason of the update's end."""
        try:
            self._remove(await self.in_thread(call, what))
        except StoreFailed as error:
            log.error("not removed from the weight store", left=str(what), error=str(error))

    async def settle(self, served: int) -> None:
        """Remove older versions and dead drafts, and call the listeners. The version is served whatever fails here."""
        if self._store is not None:
            try:
                await self.in_thread(self._store.sweep)
                await self._prune(served)
            except StoreFailed as error:
                log.error("older versions and drafts are not removed", version=served, error=str(error))
        for listener in self._listeners:
            listener()

    async def note(self, name: str, record: Json) -> None:
        """Keep a record for the next gateway, where there is a store. Raises `StoreFailed`."""
        if self._store is not None:
            await self.in_thread(note_record, self._store.folder, name, record)

    async def record(self, name: str) -> Json:
        """The record that this gateway or the one before has kept; empty where there is none."""
        return await self.in_thread(record_in, self._store.folder, name) if self._store is not None else {}

    async def adopt(self, committed: str) -> bool:
        """True where the store has the version that an engine is labelled with, also one from before our start."""
        return self._store is not None and await self.in_thread(self._store.adopt, committed)

    @asynccontextmanager
    async def reading(self, label: str) -> AsyncIterator[Path]:
        """The folder of the version of a label, which is not removed during the block. Raises `StoreFailed` where there
        is none."""
        store = self._open_store()
        if not store.has(version_of(label)):
            await self._kept()
        await self.adopt(label)
        with contextlib.ExitStack() as stack:
            yield await self.in_thread(stack.enter_context, store.reading(version_of(label)))

    async def _keep(self, draft: Path, label: str, scribe: Replica, digests: dict[str, str]) -> None:
        began, version, store = time.monotonic(), version_of(label), self._open_store()

        def checked_and_promoted() -> None:
            _check_digests(draft, digests)
            store.promote(draft, label, self._checkpoint())

        try:
            async with asyncio.timeout(self._config.load_timeout_s):
                while not await self.in_thread(is_whole, draft):
                    if scribe.state is ReplicaState.LOST:
                        raise StoreFailed(f"replica {scribe.replica_id}, which wrote it, is lost: {scribe.reason}")
                    await asyncio.sleep(_POLL_S)
            await self.in_thread(checked_and_promoted)
        except BaseException as error:
            await self.discard(draft)
            if not isinstance(error, StoreFailed | TimeoutError):
                raise
            late = f"it was not written within {self._config.load_timeout_s:g} s (weights.load_timeout_s)"
            log.error("version not kept", version=version, reason=str(error) or late)
        else:
            log.info("version kept", version=version, seconds=round(time.monotonic() - began, 3))
        await self.settle(version)

    async def why_not(self, num_bytes: int) -> str:
        """The reason why versions of so many bytes cannot be kept; empty where they can."""
        if self._store is not None:
            try:
                await self.make_room(None)
                await self._has_room(num_bytes)
            except StoreFailed as error:  # its folder is gone, and cannot be made again
                self._go_without(str(error))
        return self._why_not

    async def _has_room(self, num_bytes: int) -> bool:
        store = self._open_store()
        if await self.in_thread(store.has_room_for, _COPIES * num_bytes):
            self._why_not = ""
            return True
        self._go_without(
            f"{store.folder} has no room for {_COPIES} copies of {num_bytes / 1e9:.3g} GB: make room, name a larger "
            "place in weights.store, or say null"
        )
        return False

    def _go_without(self, reason: str) -> None:
        if reason != self._why_not:
            log.warning("no weight store: replicas that lose their weights wait for the next update", reason=reason)
        self._why_not = reason

    def _open_store(self) -> WeightStore:
        if self._store is None:
            raise StoreFailed(f"there is no weight store: {self._why_not}")
        return self._store


def in_memory(app: str) -> Path:
    """The default store of an app."""
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return place / f"rollout-gateway-{os.getuid()}-{app}"


def _check_digests(draft: Path, received: dict[str, str]) -> None:
    """Digests of a GPU are of another kind than the store's, and are not compared."""
    for name, tensor in Manifest.read(draft).tensors.items():
        kind = tensor.digest.partition(":")[0]
        if name in received and received[name].partition(":")[0] == kind and received[name] != tensor.digest:
            raise StoreFailed(f"tensor {name!r} was written with other bytes than received")
