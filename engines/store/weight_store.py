"""Weight versions in a folder: whole, with a digest of every tensor, renamed into place.

    v3-77aa0b12/     version 3, named by its label: safetensors under checkpoint names, manifest.json, and config and
                     tokenizer files linked from the served checkpoint, so that engines load it as any checkpoint folder
    draft-1f2e.../   being written; whole once it holds manifest.json. `.owner` is locked while its writer lives
    draft-gone-...   discarded, and being removed
    .gateway         locked by the gateway that keeps the store
    .relay.json      process id and port of the relay, which outlives its gateway
    .group.json      the trainer's transfer group between two updates, for the next gateway

Any file system will do; in /dev/shm a version is written and read at the speed of memory. `manifest.py` describes a
version's content, and `draft.py` writes it, for gateway, engines' workers and trainers alike.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.checkpoint.folder import WEIGHT_FILES
from engines.errors import InvalidRequest, StoreFailed
from engines.store.draft import DRAFT, OWNER, claim_draft
from engines.store.files import disk_errors, is_locked, sync, try_lock
from engines.store.manifest import MANIFEST
from engines.weight_label import version_of

_KEEPER = ".gateway"
RELAY, GROUP = ".relay.json", ".group.json"
_LOOK_S = 0.05
_GONE = "gone-"
_LONGEST_NAME = 256
_DRAFTS = re.compile(rf"{DRAFT}({_GONE})?[0-9a-f]{{32}}")
_VERSIONS = re.compile(r"v([0-9]+)(-[0-9a-f]{8})?")
"""Names of drafts, and of versions by their labels. Other names are somebody else's, and their folders stay."""


class WeightStore:
    """The store of one gateway. Blocking: not for an event loop.

    Only versions of this run are known. A version of an earlier run is known once a living engine is labelled with it
    (`adopt`).
    """

    def __init__(self, folder: Path) -> None:
        """Open or make the folder, and remove drafts of dead writers.

        Raise `StoreFailed` where the folder cannot be used, or another gateway keeps it.
        """
        self.folder = folder
        self._known: dict[int, str] = {}  # labels by version
        self._owned: dict[Path, int] = {}
        with disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_ours()
            self._lock = os.open(folder / _KEEPER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(self._lock):
            time.sleep(_LOOK_S)  # a relay that looks for its gateway has the lock for a moment
        if not try_lock(self._lock):
            os.close(self._lock)
            raise StoreFailed(
                f"{folder} is kept by another gateway: give this one a folder of its own in weights.store"
            )
        self.sweep()

    @property
    def versions(self) -> list[int]:
        """The versions that can be loaded."""
        return sorted(self._known)

    def has(self, version: int) -> bool:
        return version in self._known

    def path(self, version: int) -> Path:
        """Return the folder of a version that the store has."""
        return self._place(self._known[version])

    def close(self) -> None:
        for draft in list(self._owned):
            self.discard(draft)
        os.close(self._lock)

    def sweep(self) -> None:
        """Remove drafts whose writers are dead."""
        for draft in filter(_is_draft, self.folder.glob(f"{DRAFT}*")):
            if draft not in self._owned and (owner := _claimed(draft)) is not None:
                shutil.rmtree(draft, ignore_errors=True)
                os.close(owner)

    def has_room_for(self, num_bytes: int) -> bool:
        """Return True where `num_bytes` fit, counting the bytes of stored versions, which new versions replace."""
        ours: dict[int, int] = {}  # by inode: versions share unchanged files
        for folder in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is being removed: its room is free
                ours |= {(file := path.stat()).st_ino: file.st_size for path in folder.glob("*.safetensors")}
        return shutil.disk_usage(self.folder).free + sum(ours.values()) >= num_bytes

    def draft(self) -> Path:
        """Return a folder for a new version, ours until promoted or discarded."""
        folder, owner = claim_draft(self.folder)
        self._owned[folder] = owner
        return folder

    def named(self, name: str) -> Path:
        """Return the draft of this name that another process wrote. Raise `InvalidRequest` for anything else."""
        path = self.folder / name
        is_name = name.startswith(DRAFT) and name.removeprefix(DRAFT).isalnum() and len(name) < _LONGEST_NAME
        if not is_name or path.is_symlink() or not (path / MANIFEST).is_file():
            raise InvalidRequest(
                f"snapshot = {name!r} is no finished draft in {self.folder}: write it there with WeightSender, and "
                "give the name of its folder alone",
                param="snapshot",
            )
        return path

    def discard(self, draft: Path) -> None:
        remove_folder(self.throw_away(draft))

    def throw_away(self, draft: Path) -> Path:
        """Rename a discarded draft, so that its writer finds no folder for its next file. Return the folder to remove.

        The rename takes no time; the removal takes a second for some GB, in memory too.
        """
        # Not removed under its name: a writer that adds a file meanwhile would keep the folder, and write to its end.
        gone = self.folder / f"{DRAFT}{_GONE}{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # it is gone already
            draft.rename(gone)
        if (owner := self._owned.pop(draft, None)) is not None:
            os.close(owner)
        return gone

    def promote(self, draft: Path, label: str, checkpoint: Path | None) -> Path:
        """Make a whole draft the version that engines have this label of once it is committed. Return its folder.

        Config and tokenizer files are linked from `checkpoint`.
        """
        version, target = version_of(label), self._place(label)
        with disk_errors(draft):
            _link_rest(checkpoint, draft)
            sync(draft)
            self._known[version] = label  # before it is there: `prune` may run beside this
            try:
                draft.rename(target)  # fails where it was thrown away meanwhile
            except OSError:
                self._known.pop(version, None)
                raise
            (target / OWNER).unlink(missing_ok=True)  # not before: `sweep`, too, may run beside this
            sync(self.folder)
        if (owner := self._owned.pop(draft, None)) is not None:
            os.close(owner)
        return target

    def withdraw(self, version: int) -> Path:
        """Forget an aborted version. Return the folder to remove, as `throw_away` does."""
        return self.throw_away(self._place(self._known.pop(version, "")))

    def adopt(self, committed: str) -> bool:
        """Return True if the version that an engine is labelled with is here. It is known from now on."""
        if is_here := _is_version(self._place(committed)):
            self._known[version_of(committed)] = committed
        return is_here

    @contextmanager
    def reading(self, version: int) -> Iterator[Path]:
        """Yield the version's folder, which is not removed meanwhile. Raise `StoreFailed` where it is not there."""
        if version not in self._known:
            raise StoreFailed(f"version {version} is not in {self.folder}")
        with disk_errors(self.path(version)):
            lock = os.open(self.path(version) / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield self.path(version)
        finally:
            os.close(lock)

    def prune(self, served: int) -> list[Path]:
        """Keep the served version, newer versions and versions being read. Forget all others, and return the folders to
        remove, as `throw_away` does."""
        # Listed before the versions are read: a version that is promoted meanwhile is known, or not listed.
        there = list(filter(_is_version, self.folder.glob("v*")))
        kept = {label for version, label in self._known.items() if version >= served}  # newer: about to be served
        if served not in self._known:
            kept |= {folder.name[1:] for folder in there if version_of(folder.name[1:]) == served}
        surplus = [folder for folder in there if folder.name[1:] not in kept and not is_locked(folder / MANIFEST)]
        self._known = {version: label for version, label in self._known.items() if self._place(label) not in surplus}
        return list(map(self.throw_away, surplus))

    def _place(self, label: str) -> Path:
        return self.folder / f"v{label}"

    def _check_ours(self) -> None:
        """Raise `StoreFailed` for another user's folder: /dev/shm is open to all, and its weights could be forged."""
        status = self.folder.lstat()
        if status.st_uid != os.getuid():
            raise StoreFailed(f"{self.folder} belongs to user {status.st_uid}: give another folder in weights.store")


def _is_draft(folder: Path) -> bool:
    return _DRAFTS.fullmatch(folder.name) is not None


def _is_version(folder: Path) -> bool:
    """Return True for a folder that a store has made."""
    return _VERSIONS.fullmatch(folder.name) is not None and (folder / MANIFEST).is_file()


def remove_folder(folder: Path) -> None:
    """Remove a folder. Files that cannot be removed stay; a missing folder is no error."""
    shutil.rmtree(folder, ignore_errors=True)


def is_kept(folder: Path) -> bool:
    """Return True where a living gateway keeps the store in this folder."""
    return is_locked(folder / _KEEPER)


def note_record(folder: Path, name: str, record: Mapping[str, object]) -> None:
    """Write the record of this name, in place of any other."""
    with disk_errors(folder):
        whole = folder / f"{name}.new"
        whole.write_text(json.dumps(record), encoding="utf-8")
        whole.rename(folder / name)


def record_in(folder: Path, name: str) -> dict[str, Any]:
    """Return the record of this name; empty where there is none."""
    try:
        return dict(json.loads((folder / name).read_bytes()))
    except (OSError, ValueError):
        return {}


def remove_store(folder: Path) -> bool:
    """Remove a whole store with its versions; False where there is none, or a gateway keeps it."""
    if not folder.is_dir():
        return False
    try:
        store = WeightStore(folder)
    except StoreFailed:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    store.close()
    return True


def _link_rest(checkpoint: Path | None, folder: Path) -> None:
    if checkpoint is None or not checkpoint.is_dir():
        return
    for path in checkpoint.iterdir():
        is_weights = path.name == MANIFEST or any(path.match(pattern) for pattern in WEIGHT_FILES)
        if path.is_file() and not is_weights and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())


def _claimed(draft: Path) -> int | None:
    """Return the lock of a draft whose owner is dead; None where the owner lives."""
    try:
        owner = os.open(draft / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # just removed
    if try_lock(owner):
        return owner
    os.close(owner)
    return None
