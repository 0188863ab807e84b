"""The picture of the rooms in docs/architecture.md: layers from the import contracts, arrows from the imports."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("gateway", "engines", "sim", "trainer_client", "tuning", "loadtests")
_ONE_ROOM = ("sim", "tuning", "loadtests")
BEGIN, END = "<!-- rooms: made by python -m scripts.docs -->\n", "<!-- end of rooms -->\n"

Arrows = dict[str, set[str]]


def rooms_picture(root: Path = ROOT) -> str:
    """The layers as a drawing, and a table of every arrow."""
    return f"\n```\n{_drawing(root)}```\n\n{_table(arrows(root))}\n"


def arrows(root: Path = ROOT) -> Arrows:
    """The rooms that each room imports, by folder name.

    A room is a folder. The modules beside the rooms of a package count as `PACKAGE/*.py`; those that import a room of
    their own package are entries with a row of their own, such as `gateway/app.py`.
    """
    modules = {
        path: imported_modules(path, root) for package in PACKAGES for path in sorted((root / package).rglob("*.py"))
    }
    entries = {path for path, imported in modules.items() if _is_entry(path, imported, root)}
    found: Arrows = {}
    for path, imported in modules.items():
        here = _room(path, entries, root)
        there = {_room(target, entries, root) for target in imported} - {here}
        found[here] = found.get(here, set()) | there
    return found


def layers(root: Path = ROOT) -> dict[str, list[str]]:
    """The layers of each package that has a contract, highest first, without the package's name."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    found: dict[str, list[str]] = {}
    for contract in contracts:
        if contract["type"] == "layers":
            package = contract["layers"][0].partition(".")[0]
            found[package] = [layer.replace(f"{package}.", "") for layer in contract["layers"]]
    return found


def _drawing(root: Path) -> str:
    """The layers of each package, a floor a line."""
    return "\n".join(
        "".join([f"{package}/\n", *(f"    {floor.replace(' | ', '  |  ')}\n" for floor in floors)])
        for package, floors in layers(root).items()
    )


def _table(found: Arrows) -> str:
    head = "| room | imports of ours |\n| --- | --- |\n"
    return head + "".join(
        f"| `{room}` | {', '.join(f'`{target}`' for target in sorted(found[room])) or 'nothing'} |\n"
        for room in sorted(found, key=lambda room: (PACKAGES.index(room.partition("/")[0]), room))
    )


def imported_modules(path: Path, root: Path) -> set[Path]:
    """The modules of ours that a module imports, those under a function or TYPE_CHECKING too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {target for name in _names(tree) if (target := _module(name, root))} - {path}


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(name: str, root: Path) -> Path | None:
    """The file of an imported name: a module, or the module that defines it. None for a module of others."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return None
    for length in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:length])
        if (module := path.with_suffix(".py")).is_file():
            return module
        if (package := path / "__init__.py").is_file():
            return package
    return None


def _is_entry(path: Path, imported: set[Path], root: Path) -> bool:
    package, *below = path.relative_to(root).parts
    if len(below) > 1 or package in _ONE_ROOM:
        return False
    return any(len(parts := target.relative_to(root).parts) > 2 and parts[0] == package for target in imported)


def _room(path: Path, entries: set[Path], root: Path) -> str:
    package, *below = path.relative_to(root).parts
    if package in _ONE_ROOM:
        return package
    if path in entries:
        return f"{package}/{below[0]}"
    return f"{package}/{below[0]}" if len(below) > 1 else f"{package}/*.py"
