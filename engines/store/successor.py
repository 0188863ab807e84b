"""A version that is made of the one it has changes to: which of its files have to come, and how it is put together."""

from dataclasses import replace
from pathlib import Path

from engines.errors import StoreFailed
from engines.store.draft import Draft
from engines.store.manifest import Manifest, StoredTensor, check_bytes


class Successor:
    """The version of `manifest`, where folder `base` holds what `held` says: the version that it has changes to.

    A file comes whole, so a tensor is made of changes, or taken as it was, where no other of its file has to come.
    """

    def __init__(self, manifest: Manifest, base: Path, held: Manifest) -> None:
        self._manifest = manifest
        self._base = base
        tensors, there = manifest.tensors, {name: tensor.digest for name, tensor in held.tensors.items()}
        come = {one.file for name, one in tensors.items() if there.get(name) not in (one.digest, one.base)}
        made = {name: tensor for name, tensor in tensors.items() if tensor.file not in come}
        self._same = {name for name, tensor in made.items() if there[name] == tensor.digest}
        self._changed = {name: tensor for name, tensor in made.items() if name not in self._same}

    @classmethod
    def of(cls, folder: Path, versions: Path) -> "Successor | None":
        """Of the version whose manifest is in `folder`; None where it has changes to none that is among `versions`."""
        try:
            manifest = Manifest.read(folder)
            base = versions / f"v{manifest.base}"
            held = Manifest.read(base)
        except StoreFailed:
            return None
        return cls(manifest, base, held) if held.version == manifest.base else None

    def needs(self, file: str) -> bool:
        """Whether a file of the version has to come."""
        return file not in self._files - self._files_that_come

    def build(self, folder: Path) -> Manifest:
        """Make the version in `folder`, where the files that it needs are, and check its bytes.

        Raises `InvalidRequest` or `StoreFailed` where that cannot be, or other bytes came of it.
        """
        changed: dict[str, StoredTensor] = {name: replace(one, file="") for name, one in self._changed.items()}
        come = {name: one for name, one in self._manifest.tensors.items() if name not in changed.keys() | self._same}
        draft = Draft(folder, self._manifest.model, come | changed, self._manifest.base)
        draft.join(self._base)
        draft.complete_from(self._base, self._same)
        draft.finish()
        replace(Manifest.read(folder), version=self._manifest.version).write(folder)
        return check_bytes(folder)

    @property
    def _files(self) -> set[str]:
        return {file for tensor in self._manifest.tensors.values() for file in (tensor.file, tensor.changes)}

    @property
    def _files_that_come(self) -> set[str]:
        made = self._changed.keys() | self._same
        whole = {tensor.file for name, tensor in self._manifest.tensors.items() if name not in made}
        return whole | {tensor.changes for tensor in self._changed.values()}
