"""Keys in files: `file:PATH` in the configuration refers to one or more keys, separated by white space."""

from pathlib import Path

_PREFIX = "file:"


def key_file(item: str) -> Path | None:
    """Return the file that an item of the configuration refers to; None for another item."""
    path = item.removeprefix(_PREFIX)
    return Path(path).expanduser() if path and path != item else None


def keys_in(path: Path) -> list[str]:
    """Return the keys of a file. Raise `OSError` where it cannot be read, and `ValueError` where it holds none."""
    found = path.read_text(encoding="utf-8").split()
    if not found:
        raise ValueError(f"no key in {path}")
    return found
