"""A patch of the examined files that renames what verl renamed. Nothing is written, and no value is changed."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from tuning.doctor.finding import Finding


def patch_of(findings: Iterable[Finding]) -> str:
    """Return a unified diff over all scripts, for `patch -p0`."""
    files: dict[Path, list[str]] = {}
    for finding in findings:
        name, _, line = finding.place.rpartition(":")
        # A key alone is that of the table: other findings on keys have a value, a sign or a question.
        is_key = finding.rule == "verl-keys" and re.fullmatch(r"[\w.]+", finding.suggestion)
        if is_key and finding.origin == "cli" and Path(name).is_file():
            lines = files.setdefault(Path(name), Path(name).read_text(encoding="utf-8").splitlines(keepends=True))
            wanted = rf"(?<![\w.]){re.escape(finding.key)}="
            lines[int(line) - 1] = re.sub(wanted, f"{finding.suggestion}=", lines[int(line) - 1], count=1)
    return "".join(_diff(path, lines) for path, lines in files.items())


def _diff(path: Path, lines: list[str]) -> str:
    before = path.read_text(encoding="utf-8").splitlines(keepends=True)
    texts = difflib.unified_diff(before, lines, str(path), str(path))
    return "".join(text if text.endswith("\n") else f"{text}\n\\ No newline at end of file\n" for text in texts)
