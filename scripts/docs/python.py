"""Finds Python in README.md and docs/ that does not parse, or imports names of ours that do not exist. Runs none."""

import ast
from collections.abc import Iterator
from pathlib import Path

from scripts.docs.pages import ROOT, Place, doc_paths, read_page

_OURS = ("engines", "examples", "gateway", "loadtests", "sim", "trainer_client", "tuning")


def wrong_python(root: Path = ROOT) -> Iterator[str]:
    """A line for each block that does not parse, and for each import of a name that does not exist."""
    for path in doc_paths(root):
        for block in read_page(path, root).python:
            yield from _wrong(block, root)


def _wrong(block: Place, root: Path) -> Iterator[str]:
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        yield f"{block}: {error.msg} in line {error.lineno} of the block"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in _OURS:
            missing = [alias.name for alias in node.names if not _exists(node.module, alias.name, root)]
            yield from (f"{block}: {node.module} has no {name}" for name in missing)


def _exists(module: str, name: str, root: Path) -> bool:
    folder = root.joinpath(*module.split("."))
    if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
        return True
    files = [path for path in (folder.with_suffix(".py"), folder / "__init__.py") if path.is_file()]
    return any(name in _names(path) for path in files)


def _names(path: Path) -> set[str]:
    """The names that a module defines or imports at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
