"""Constructs that mean something else on an older release of a Python that pyproject.toml allows."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("engines", "examples", "gateway", "loadtests", "sim", "trainer_client", "tuning")


def test_no_error_is_raised_from_an_except_star_clause() -> None:
    """Python before 3.11.4, as Debian 12 has it, wraps that error in a group, so nobody catches it by its type."""
    clauses = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in PRODUCT
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.TryStar)
    ]
    assert clauses == []
