"""Markdown, taken apart: prose, links, headings, inline code and blocks of commands.

Pages are README.md, SECURITY.md, CONTRIBUTING.md and docs/. The heads of modules, scripts and configurations have
commands too.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(```|~~~)(\w*)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_PROMPTS = ("", "bash", "sh", "console")
_MODULES = ("engines", "examples", "gateway", "loadtests", "scripts", "sim", "trainer_client", "tuning")
_CONFIGURED = ("examples", "loadtests")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a page."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Page:
    """A page's lines, apart by what they are. Paths are relative to the repository's root."""

    path: Path
    prose: tuple[Place, ...]
    shell: tuple[Place, ...]
    """Lines of blocks of commands, fenced or indented; a line that ends in a backslash is joined with the next."""
    python: tuple[Place, ...]
    """Blocks of Python, each with the line that its code starts at."""

    @property
    def anchors(self) -> set[str]:
        """The anchors of the headings, as GitHub makes them: a repeated one has a number behind it."""
        found: dict[str, int] = {}
        anchors = set()
        for place in self.prose:
            if heading := _HEADING.match(place.text):
                slug = anchor(heading[1])
                anchors.add(f"{slug}-{found[slug]}" if slug in found else slug)
                found[slug] = found.get(slug, 0) + 1
        return anchors

    @property
    def links(self) -> list[tuple[Place, str]]:
        """Targets of links with the line that has them; text in backticks holds none."""
        return [(place, target) for place in self.prose for target in _LINK.findall(_INLINE_CODE.sub("", place.text))]

    @property
    def inline_code(self) -> list[tuple[Place, str]]:
        """Each text in backticks with its line."""
        return [(place, code) for place in self.prose for code in _INLINE_CODE.findall(place.text)]


def doc_paths(root: Path = ROOT) -> list[Path]:
    """README.md, SECURITY.md, CONTRIBUTING.md and every page under docs/."""
    first = [path for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md") if (path := root / name).is_file()]
    return [*first, *sorted((root / "docs").rglob("*.md"))]


def read_page(path: Path, root: Path = ROOT) -> Page:
    """The page at `path`."""
    return _page(path, root, enumerate(path.read_text(encoding="utf-8").splitlines(), 1))


def heads(root: Path = ROOT) -> Iterator[Page]:
    """The docstring of each module, and the first comment of each script and configuration, as pages."""
    for folder in _MODULES:
        for path in sorted((root / folder).rglob("*.py")):
            yield _page(path, root, _docstring(path.read_text(encoding="utf-8")))
    for folder in _CONFIGURED:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".sh", ".yaml", ".yml"):
                yield _page(path, root, _comment(path.read_text(encoding="utf-8")))


def _docstring(source: str) -> list[tuple[int, str]]:
    """The lines of the module's docstring with their numbers, as they stand in the source."""
    body = ast.parse(source).body
    if not (body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)):
        return []
    first, last = body[0].lineno, body[0].end_lineno
    lines = [line.removeprefix('"""').removesuffix('"""') for line in source.splitlines()[first - 1 : last]]
    return list(enumerate(lines, first))


def _comment(source: str) -> list[tuple[int, str]]:
    """The lines of the comment at the file's start with their numbers, without their marks."""
    numbered = enumerate(source.splitlines(), 1)
    head = takewhile(lambda line: line[1].startswith("#"), numbered)
    return [(number, text.removeprefix("#").removeprefix(" ")) for number, text in head if not text.startswith("#!")]


def _page(path: Path, root: Path, lines: Iterable[tuple[int, str]]) -> Page:
    name = str(path.relative_to(root))
    prose: list[Place] = []
    shell: list[Place] = []
    python: list[Place] = []
    fence = language = ""
    for number, text in lines:
        place = Place(name, number, text)
        if opening := _FENCE.match(text.strip()):
            fence, language = ("", "") if fence else (opening[1], opening[2])
            python += [Place(name, number + 1, "")] if language == "python" else []
        elif fence and language == "python":
            python.append(Place(name, python[-1].line, f"{python.pop().text}{text}\n"))
        elif fence:
            shell += [place] if language in _PROMPTS else []
        elif text.startswith("    "):
            shell.append(place)
        else:
            prose.append(place)
    return Page(path, tuple(prose), tuple(_joined(shell)), tuple(python))


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def _joined(lines: list[Place]) -> list[Place]:
    joined: list[Place] = []
    for place in lines:
        if joined and joined[-1].text.endswith("\\"):
            first = joined.pop()
            place = Place(first.page, first.line, first.text[:-1] + place.text)
        joined.append(place)
    return joined
