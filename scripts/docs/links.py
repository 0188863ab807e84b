"""Finds what README.md and docs/ name and the tree lacks: pages, anchors, files, functions."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.docs.pages import ROOT, Page, doc_paths, read_page

_OURS = re.compile(
    r"^(?:gateway|engines|trainer_client|loadtests|tests|scripts|examples|docs)/(?:[\w./*-]*(?:\.\w+|/))?$"
)
_MODULE = re.compile(r"^[\w/]+\.py$")
_FILE_AND_NAMES = re.compile(r"`([\w/]+\.py)`[ |:]+((?:`[A-Za-z_][\w.]*`(?:, )?)+)")
_NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
_MEMBER = re.compile(r"^[A-Z]\w+\.[a-z_]\w*$")
_CODE = ("gateway", "engines", "sim", "trainer_client", "tuning", "loadtests", "tests", "scripts", "examples")


def dead_links(root: Path = ROOT) -> Iterator[str]:
    """A line for each link, anchor, file or function that is named and does not exist."""
    pages = {path: read_page(path, root) for path in doc_paths(root)}
    for page in pages.values():
        yield from _links(page, pages)
        yield from _files(page, root)
        yield from _functions(page, root)
        yield from _members(page, root)


def _links(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for place, target in page.links:
        if re.match(r"^[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        linked = (page.path.parent / path).resolve() if path else page.path
        if not linked.exists():
            yield f"{place}: no file {target}"
        elif fragment and linked in pages and fragment not in pages[linked].anchors:
            yield f"{place}: no heading #{fragment} in {linked.name}"


def _files(page: Page, root: Path) -> Iterator[str]:
    for place, code in page.inline_code:
        if _OURS.match(code) and not (list(root.glob(code)) if "*" in code else (root / code).exists()):
            yield f"{place}: no file {code}"
        elif _MODULE.match(code) and not _OURS.match(code) and not _module_files(code, root):
            yield f"{place}: no module {code}"


def _functions(page: Page, root: Path) -> Iterator[str]:
    for place in page.prose:
        for file, names in _FILE_AND_NAMES.findall(place.text):
            defined = {name for path in _module_files(file, root) for name in _defined(path)}
            for name in _NAME.findall(names):
                if not any(full == name or full.endswith(f".{name}") for full in defined):
                    yield f"{place}: {file} has no {name}"


def _members(page: Page, root: Path) -> Iterator[str]:
    for place, code in page.inline_code:
        if _MEMBER.match(code) and code not in _all_members(root):
            yield f"{place}: no class has {code}"


def _module_files(name: str, root: Path) -> list[Path]:
    """The module of that path, or every module that is so named."""
    if "/" in name:
        return [path] if (path := root / name).is_file() else []
    return [path for folder in _CODE for path in (root / folder).rglob(name)]


@cache
def _all_members(root: Path) -> set[str]:
    """`Class.member` of every class of ours."""
    return {name for path in _module_files("*.py", root) for name in _defined(path)}


@cache
def _defined(path: Path) -> set[str]:
    """Names of functions, classes, methods and fields of classes, with dots."""
    return set(_names_below(ast.parse(path.read_text(encoding="utf-8")), ""))


def _names_below(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield prefix + child.name
            yield from _names_below(child, f"{prefix}{child.name}.")
            yield from (f"{prefix}{child.name}.{name}" for name in _set_on_self(child))
        elif isinstance(child, ast.Assign):
            yield from (prefix + target.id for target in child.targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield prefix + child.target.id


def _set_on_self(tree: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
