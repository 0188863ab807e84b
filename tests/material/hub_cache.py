"""A Hugging Face cache as the hub's own library leaves it after a download."""

import shutil
from pathlib import Path


def cached(files: Path, cache: Path, model: str, *, revision: str = "main", commit: str = "a" * 40) -> Path:
    """Put a checkpoint folder into the cache under an id; the folder that engines then read."""
    place = cache / f"models--{model.replace('/', '--')}"
    snapshot, blobs = place / "snapshots" / commit, place / "blobs"
    for folder in (snapshot, blobs, place / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(commit)
    for file in files.iterdir():
        blob = blobs / f"{commit[:8]}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
