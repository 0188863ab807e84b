"""Pieces of a file are written by a process that may be of an environment without this package."""

import ast
import sys
from pathlib import Path

from engines.store import pieces


def test_the_process_imports_nothing_of_ours_and_of_others_the_hash_alone() -> None:
    tree = ast.parse(Path(pieces.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name.partition(".")[0]
        for node in imports
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert names - sys.stdlib_module_names == {"xxhash"}
