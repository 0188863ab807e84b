"""Commands that name what does not exist are found. `python -m scripts.docs --check` proves that others are not."""

from pathlib import Path

import pytest

from scripts.docs.commands import wrong_commands

MODULE = """import argparse

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--url", required=True)
    parser.add_argument("overrides", nargs="*")
    parser.parse_args()
    raise RuntimeError("it ran")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("docs", "loadtests", "gateway"):
        (tmp_path / folder).mkdir()
    (tmp_path / "loadtests" / "study.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "loadtests" / "room").mkdir()
    (tmp_path / "loadtests" / "room" / "__main__.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "Makefile").write_text("demo: setup\n\t$(ARGS)\n", encoding="utf-8")
    return tmp_path


def _found(root: Path, command: str) -> list[str]:
    (root / "README.md").write_text(f"```\n{command}\n```\n", encoding="utf-8")
    return list(wrong_commands(root))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("make demos", "make has no target demos"),
        ("make demo SPEED=1", "make knows no SPEED"),
        ("python -m loadtests.none", "no module loadtests.none"),
        ("python -m loadtests.study --url URL --rounds 5", "loadtests.study: unrecognized arguments: --rounds"),
        (
            "python -m loadtests.study --url URL --pairs few",
            "loadtests.study: argument --pairs: invalid int value: 'few'",
        ),
        ("python -m loadtests.study", "loadtests.study: the following arguments are required: --url"),
        ("python -m loadtests.study --url URL -- make demos", "make has no target demos"),
        ("rollout-gateway start", "rollout-gateway start: No such command 'start'."),
        ("rollout-gateway config print", "rollout-gateway config print: No such command 'print'."),
        ("rollout-gateway logs -n many", "rollout-gateway logs -n many: Invalid value for '--lines'"),
        ("rollout-gateway status --speed 1", "rollout-gateway status --speed 1: No such option: --speed"),
        ("rollout-gateway up --speed 1", "up has no option --speed"),
        ("rollout-gateway up gateway.speed=1", "no key gateway.speed"),
        ("locust -f loadtests/scenarios/none.py", "no scenario loadtests/scenarios/none.py"),
        ("examples/none.sh URL", "no file examples/none.sh"),
    ],
)
def test_a_name_that_does_not_exist_is_found(root: Path, command: str, reason: str) -> None:
    (found,) = _found(root, command)
    assert found.startswith(f"README.md:2: {reason}")


def test_keys_in_prose_are_compared_with_the_schema(root: Path) -> None:
    (root / "README.md").write_text("`weights.relay`, `engines.NAME.python`, `weights.speed`", encoding="utf-8")
    assert list(wrong_commands(root)) == ["README.md:1: no key weights.speed"]


def test_commands_of_docstrings_and_of_first_comments_are_compared_too(root: Path) -> None:
    (root / "loadtests" / "told.py").write_text('"""A module.\n\n    make demos\n"""\n', encoding="utf-8")
    (root / "loadtests" / "told.yaml").write_text("# A file: `make tests`.\n#\n#     make demo\n", encoding="utf-8")
    assert list(wrong_commands(root)) == [
        "loadtests/told.py:3: make has no target demos",
        "loadtests/told.yaml:1: make has no target tests",
    ]
