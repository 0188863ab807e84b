"""A patch of the examined files with the values that findings suggest. Nothing is written."""

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tuning.doctor.finding import Finding, Severity

_KEYS = "verl-keys"
# Rules whose suggestion is half of a change, though it does not say so as "True, with ..." does: the other half is
# another key.
_IN_TWO_PLACES = ("data-parallel", "prompt-length", "response-length", "verl-sampling", "verl-ulysses")
_NO_VALUES = ("on", "off", "one")
_VALUE = re.compile(r"(True|False|true|false|-?\d+(?:\.\d+)?|[a-z][\w-]+)(?=$|;|,? or | to )")
_WRITTEN = r"(?P<before>(?<![\w.]){name}[\"']?\s*[:=]\s*)(?P<value>[^\s#,\\\"'}}]+)"


def patch_of(findings: Iterable[Finding]) -> str:
    """Return a unified diff over all files, for `patch -p0`.

    A finding without a place, a value of its own or a line that writes the value is left out.
    """
    files: dict[Path, list[str]] = {}
    for finding in findings:
        if finding.severity is Severity.FINE or finding.is_general or not (place := _place(finding)):
            continue
        path, line = place
        lines = files.setdefault(path, path.read_text(encoding="utf-8").splitlines(keepends=True))
        if 0 < line <= len(lines):
            lines[line - 1] = _changed(lines[line - 1], finding)
    return "".join(text for path, lines in files.items() for text in _diff(path, lines))


def _place(finding: Finding) -> tuple[Path, int] | None:
    """Return file and line of a place in an existing file."""
    name, _, line = finding.place.rpartition(":")
    if finding.origin not in ("file", "cli") or not line.isdigit() or not Path(name).is_file():
        return None
    return Path(name), int(line)


def _changed(line: str, finding: Finding) -> str:
    """Return the line with the suggestion in it; unchanged where the suggestion is no plain value."""
    if finding.rule == _KEYS:
        return _renamed(line, finding)
    value = _VALUE.match(finding.suggestion)
    if value is None or finding.rule in _IN_TWO_PLACES or (value[1] in _NO_VALUES):
        return line
    for name in (re.escape(finding.key), re.escape(finding.key.rpartition(".")[2])):
        written = re.search(_WRITTEN.format(name=name), line)
        if written and "$" not in written["value"]:
            return line[: written.start("value")] + value[1] + line[written.end("value") :]
    return line


def _renamed(line: str, finding: Finding) -> str:
    """Replace a key that Hydra refuses by the key that it takes, with or without a plus."""
    key = finding.suggestion.partition("=")[0]
    if not re.fullmatch(r"\+?[\w.]+", key):
        return line
    return re.sub(rf"(?<![\w.])\+?{re.escape(finding.key)}=", lambda _: f"{key}=", line, count=1)


def _diff(path: Path, lines: list[str]) -> Iterator[str]:
    before = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for text in difflib.unified_diff(before, lines, str(path), str(path)):
        yield text if text.endswith("\n") else f"{text}\n\\ No newline at end of file\n"
