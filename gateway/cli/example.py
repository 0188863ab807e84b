"""`rollout-gateway example`: lists the examples that the package holds, and writes one out with all that it names."""

import re
from importlib.resources import files
from pathlib import Path

from engines.errors import ConfigError

_NAMED = re.compile(r"\bexamples[/.](\w[\w./-]*\w)")
"""A file, folder or module of the examples, in another example."""
_LISTED = (".yaml", ".py", ".sh")


def list_examples() -> list[tuple[str, str]]:
    """Names and titles of the examples that stand for themselves."""
    return [(str(name), _title(path)) for name, path in _examples().items() if path.suffix in _LISTED]


def write_example(name: str, folder: Path) -> list[Path]:
    """Write the example, and what it names, below `folder`/examples. Return the files; those that are there stay.

    Raises `ConfigError` for an unknown name."""
    examples = _examples()
    wanted = Path(name.removeprefix("examples/"))
    if wanted not in examples:
        raise ConfigError(f"there is no example {name}; `rollout-gateway example` lists them")
    todo, needed = [wanted], set[Path]()
    while todo:
        needed.add(one := todo.pop())
        named = _NAMED.findall(examples[one].read_text(encoding="utf-8", errors="ignore"))
        todo += [other for other in examples if other not in needed and any(_is_named(other, text) for text in named)]
    targets = {folder / "examples" / path: examples[path] for path in sorted(needed)}
    for target, source in targets.items():
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode)
    return list(targets)


def _is_named(path: Path, text: str) -> bool:
    module = path.with_suffix("").as_posix().replace("/", ".")
    return text in (path.as_posix(), module) or path.is_relative_to(text)


def _examples() -> dict[Path, Path]:
    """The files by their paths in the folder: the wheel has it inside the package, a checkout beside it."""
    package = Path(str(files("gateway")))
    root = next(folder for folder in (package / "examples", package.parent / "examples") if folder.is_dir())
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root): path for path in found}


def _title(path: Path) -> str:
    lines = [line.lstrip('# "') for line in path.read_text(encoding="utf-8").splitlines()]
    first = next(line for line in lines if line and not line.startswith("!"))
    return re.split(r"[.:,;](?:\s|$)", first)[0]
