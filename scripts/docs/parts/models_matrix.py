"""The matrix of models in docs/compatibility.md, from the rows that the study `model_matrix` left in docs/results/."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.docs.parts.table import table

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "model-matrix.json"
BEGIN, END = "<!-- models: made by python -m scripts.docs -->\n", "<!-- end of models -->\n"

_COLUMNS = [
    *((source, way) for source in ("module", "state_dict") for way in ("flat", "store")),
    *(("TRL", way) for way in ("flat", "store")),
]
_AFTER = {
    "forms": tuple(f"{form}, store" for form in ("copies", "DDP", "DDP of compiled", "iterator")),
    "kill": ("kill, flat", "kill"),
    "fetch": ("fetch",),
    "restart": ("restart",),
}
_WORST = ("wrong", "better", "refused", "right", "-")

Row = Mapping[str, Any]


def models_matrix() -> str:
    """Return the matrix of the kept rows."""
    return page(json.loads(RESULTS.read_text(encoding="utf-8")))


def page(rows: Sequence[Row]) -> str:
    """Return the table of the rows, and below it the models that the engine does not start with."""
    ran = [row for row in rows if row["cells"]]
    head = ["model", "kind", "dtype", *(f"{source}, {way}" for source, way in _COLUMNS), *_AFTER]
    on = sorted({f"{row['engine']} on CPU, transformers {row['transformers']}" for row in ran})
    not_run = [f"* {row['model']}: {row['problem'].splitlines()[0]}" for row in rows if not row["cells"]]
    below = ["Models that did not run:", "", *not_run, ""] if not_run else []
    return "\n".join(
        ["", f"{len(ran)} models; {', '.join(on)}.", "", *table(head, [_line(row) for row in ran]), "", *below, ""]
    )


def _line(row: Row) -> list[str]:
    cells = [[name for name in row["cells"] if name.startswith(f"{source}, {way}")] for source, way in _COLUMNS]
    return [row["model"], row["family"], row["dtype"], *(_cell(row, names) for names in (*cells, *_AFTER.values()))]


def _cell(row: Row, names: Sequence[str]) -> str:
    """Return the worst of several results; nothing where the row was cut off before."""
    words = [row["cells"][name]["verdict"] for name in names if name in row["cells"]]
    if not words:
        return ""
    worst = min(words, key=_WORST.index)
    return f"**{worst}**" if worst == "wrong" else worst
