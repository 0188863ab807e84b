"""Processes as /proc shows them: their end, and the trees that they form. Standard library alone, as the guard is."""

import os
from pathlib import Path

_PROC = Path("/proc")


def has_ended(pid: int) -> bool:
    """Return True once a process has given back its memory, files and ports, or is gone."""
    return _living_parent(pid) is None


def descendants(*roots: int) -> list[int]:
    """List the process ids below `roots` that have not ended."""
    children: dict[int, list[int]] = {}
    for process in _PROC.glob("[0-9]*"):
        pid = int(process.name)
        if (parent := _living_parent(pid)) is not None:
            children.setdefault(parent, []).append(pid)
    found, frontier = [], list(roots)
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _living_parent(pid: int) -> int | None:
    """Return the parent of a process; None once it has ended.

    Its first thread becomes a zombie at its own end. The other threads may still hold the memory and the files.
    """
    process = _PROC / str(pid)
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        if state in "ZX" and len(os.listdir(process / "task")) <= 1:
            return None
    except OSError:
        return None
    return int(parent)
