"""Builds a version from its base and the changes to it: the files to fetch, and the assembly."""

from dataclasses import replace
from pathlib import Path

from engines.errors import StoreFailed
from engines.store.draft import Draft
from engines.store.manifest import Manifest, StoredTensor, check_bytes


class Successor:
    """The version of `manifest`; folder `base` holds its base, whose manifest is `held`.

    Files are fetched whole, so a tensor is built from changes, or taken from the base, only where no other tensor of
    its file has to be fetched.
    """

    def __init__(self, manifest: Manifest, base: Path, held: Manifest) -> None:
        self._manifest = manifest
        self._base = base
        tensors, digests = manifest.tensors, {name: tensor.digest for name, tensor in held.tensors.items()}
        fetched = {
            tensor.file for name, tensor in tensors.items() if digests.get(name) not in (tensor.digest, tensor.base)
        }
        built = {name: tensor for name, tensor in tensors.items() if tensor.file not in fetched}
        self._same = {name for name, tensor in built.items() if digests[name] == tensor.digest}
        self._changed = {name: tensor for name, tensor in built.items() if name not in self._same}
        fetched |= {tensor.changes for tensor in self._changed.values()}
        self._spared = {file for tensor in tensors.values() for file in (tensor.file, tensor.changes)} - fetched

    @classmethod
    def of(cls, folder: Path, versions: Path) -> "Successor | None":
        """Return that of the version whose manifest is in `folder`; None where folder `versions` lacks its base."""
        try:
            manifest = Manifest.read(folder)
            base = versions / f"v{manifest.base}"
            held = Manifest.read(base)
        except StoreFailed:
            return None
        return cls(manifest, base, held) if held.version == manifest.base else None

    def needs(self, file: str) -> bool:
        """True where a file of the version has to be fetched."""
        return file not in self._spared

    def build(self, folder: Path) -> Manifest:
        """Build the version in `folder`, which has the needed files, and check its bytes.

        Raises `InvalidRequest` or `StoreFailed` where that fails or the bytes differ.
        """
        changed: dict[str, StoredTensor] = {name: replace(one, file="") for name, one in self._changed.items()}
        built = changed.keys() | self._same
        fetched = {name: tensor for name, tensor in self._manifest.tensors.items() if name not in built}
        draft = Draft(folder, self._manifest.model, fetched | changed, self._manifest.base)
        draft.join(self._base)
        draft.complete_from(self._base, self._same)
        draft.finish()
        replace(Manifest.read(folder), version=self._manifest.version).write(folder)
        return check_bytes(folder)
