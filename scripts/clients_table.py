"""The table of clients in README.md, from the results of real runs in docs/results/clients/.

python -m scripts.clients_table            # write it into README.md
CLIENTS_OUT=docs/results/clients make test-all    # run clients again; benches: loadtests/studies/bench_clients.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "clients"
README = ROOT / "README.md"

BEGIN, END = "<!-- clients: made by python -m scripts.clients_table -->\n", "<!-- end of clients -->\n"
_HEAD = "| client | version | against | what was run | result | on |\n| --- | --- | --- | --- | --- | --- |\n"

Result = dict[str, Any]


def read_results(folder: Path = RESULTS) -> list[Result]:
    """One a client, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def table(results: Sequence[Result]) -> str:
    """Return the rows with a head, by client name."""
    return _HEAD + "".join(_row(one) for one in results)


def with_table(page: str, rows: str) -> str:
    """Return the page with `rows` between its marks. Raise `ValueError` for a page without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no place for the table: {BEGIN!r} and {END!r} are missing")
    return before + BEGIN + rows + END + after


def _row(one: Result) -> str:
    cells = [one["client"], one["version"], one["against"], one["ran"], _outcome(one), one["date"]]
    return f"| {' | '.join(cells)} |\n"


def _outcome(one: Result) -> str:
    outcomes = list(one["checks"].values())
    passed = outcomes.count("passed")
    counted = f"{passed} of {len(outcomes)} checks" if len(outcomes) > 1 else "yes" if passed else "**no**"
    return "; ".join([counted, *one["facts"]])


def main() -> None:
    README.write_text(with_table(README.read_text(encoding="utf-8"), table(read_results())), encoding="utf-8")


if __name__ == "__main__":
    main()
