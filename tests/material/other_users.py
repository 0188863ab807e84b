"""Folders of another user, for tests that run as one user."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

THEIRS = 4711
"""The user's number."""


def lstat_with_others(folders: set[Path]) -> Callable[[Path], os.stat_result]:
    """Return `Path.lstat` with these folders as the user's."""
    own = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        fields = list(own(path))
        fields[stat.ST_UID] = THEIRS if path in folders else fields[stat.ST_UID]
        return os.stat_result(fields)

    return lstat
