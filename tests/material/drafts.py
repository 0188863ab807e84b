"""Small drafts in a weight store, and what is in one."""

from pathlib import Path

from engines.checkpoint.folder import read_spans
from engines.store.draft import Draft, RawTensor, raw
from engines.store.manifest import Manifest
from engines.store.weight_store import WeightStore


def tensor(name: str, fill: int, size: int = 16) -> RawTensor:
    return raw(name, "uint8", [size], bytes([fill]) * size)


def written(store: WeightStore, fill: int, *names: str) -> Path:
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor(name, fill) for name in names or ("a", "b")])
    draft.finish()
    return folder


def file_bytes(folder: Path, name: str) -> bytes:
    file = Manifest.read(folder).tensors[name].file
    (span,) = (span for span in read_spans(folder)[file] if span.name == name)
    return (folder / file).read_bytes()[span.begin : span.end]


def kept(store: Path, version: int) -> Path:
    """The folder of a version in a store."""
    (folder,) = store.glob(f"v{version}-*")
    return folder
