"""The table of clients in docs/compatibility.md, from the results that real runs left in docs/results/clients/.

    python -m scripts.docs                            # write it
    CLIENTS_OUT=docs/results/clients make test-all    # run the clients again

The bench clients were run by a study that docs/benchmarks.md names the commit of.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "clients"

BEGIN, END = "<!-- clients: made by python -m scripts.docs -->\n", "<!-- end of clients -->\n"
_HEAD = "| client | version | against | run | result | on |\n| --- | --- | --- | --- | --- | --- |\n"

Result = dict[str, Any]


def clients_table() -> str:
    """The table of all kept results."""
    return f"\n{table(read_results())}\n"


def read_results(folder: Path = RESULTS) -> list[Result]:
    """Returns one result a client, in the order of names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def table(results: Sequence[Result]) -> str:
    """A head and a row for each result."""
    return _HEAD + "".join(_row(result) for result in results)


def _row(result: Result) -> str:
    cells = [result["client"], result["version"], result["against"], result["ran"], _outcome(result), result["date"]]
    return f"| {' | '.join(cells)} |\n"


def _outcome(result: Result) -> str:
    outcomes = list(result["checks"].values())
    passed = outcomes.count("passed")
    counted = f"{passed} of {len(outcomes)} checks" if len(outcomes) > 1 else "yes" if passed else "**no**"
    return "; ".join([counted, *result["facts"]])
