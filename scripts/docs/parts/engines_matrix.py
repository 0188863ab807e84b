"""Makes docs/engines.md from kept results of the conformance suite and of weight updates, and from the table of levers.

`python -m scripts.docs` writes it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.levers import LEVERS
from scripts.docs.parts.table import table
from scripts.docs.parts.updates_matrix import Check, section

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "conformance"

_NAMES = {"sim": "simulated", "vllm": "vLLM", "sglang": "SGLang"}
_HEAD = """# Engines

The gateway's needs of an engine, checked on running ones, and the engines' names of our levers. The page is generated
by `python -m scripts.docs` from `docs/results/` and `engines/levers.py`.

## Conformance

One suite, `tests/engines/conformance/`, starts an engine as the product does and speaks to it through the `Engine`
interface. Each row is one check. `yes` passed; `no` is a lack that the suite declares and has seen the engine show,
with the reason below; `not run` lacked a precondition outside of the engine; `FAIL` failed.

    CONFORMANCE_CONFIG=FILE.yaml CONFORMANCE_OUT=docs/results/conformance/NAME.json \\
        python -m pytest -q tests/engines/conformance
"""
_SPECULATION = """## Speculative decoding

A draft proposes tokens and the model checks each: tokens are the model's whatever the draft holds. An update changes

| draft | vLLM | SGLang (0.5.23) |
| --- | --- | --- |
| n-grams, suffixes | nothing: it has no weights; seen: 0.32 on CPU, 0.26 on a GPU | nothing (NGRAM) |
| a model of its own checkpoint | nothing, frozen; seen: 0.32 on CPU, 0.26 on a GPU | nothing, frozen (STANDALONE) |
| EAGLE, EAGLE3, Medusa | the parts that it shares with the model; the rest is frozen | the same; Medusa is not there |
| MTP layers of the model | shared parts; the rest on CUDA, unquantized, where it is sent | the same (EAGLE) |
| other methods | as the engine holds them: shared, or frozen | no updates through our plugin |

SGLang's drafts were tried with small models of torch in their place. `draft` of a replica in `/status` says what its
draft holds; [Weight updates](design/weight-updates.md#speculative-decoding) has the details.
"""
_LEVERS_HEAD = """## Levers

Keys of `engine` in the configuration, and the argument that each becomes. Where SGLang has no argument of that meaning,
the key is an error that names the alternative. Any other argument of an engine goes under `engine.extra` by the
engine's own name.
"""

Result = dict[str, Any]


def read_results(folder: Path = RESULTS) -> list[Result]:
    """Return the results, simulated first, then by kind, device and version."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    kinds = list(_NAMES)
    return sorted(results, key=lambda one: (kinds.index(one["kind"]), one["device"], one["engine_version"]))


def page(results: Sequence[Result], checks: Sequence[Check]) -> str:
    """Return docs/engines.md."""
    columns = list({(_name(one), *one["checks"].values()): one for one in results}.values())  # models alike share one
    conformance = [_HEAD, *_runs(results), "", *_matrix(columns), "", *_reasons(columns)]
    return "\n".join([*conformance, *section(checks), _SPECULATION, _LEVERS_HEAD, *_levers(), ""])


def _runs(results: Sequence[Result]) -> list[str]:
    rows = [
        [_short_name(one), one["device"], one["model"], one["dtype"], one["date"], _counts(one["checks"])]
        for one in results
    ]
    return table(["engine", "device", "model", "dtype", "run on", "checks"], rows)


def _counts(checks: dict[str, str]) -> str:
    words = [_word(outcome) for outcome in checks.values()]
    return ", ".join(f"{words.count(word)} {word}" for word in ("yes", "no", "not run", "FAIL") if word in words)


def _matrix(results: Sequence[Result]) -> list[str]:
    checks = list(dict.fromkeys(check for one in results for check in one["checks"]))
    rows = [[check, *(_word(one["checks"].get(check, "not run")) for one in results)] for check in checks]
    return table(["check", *map(_name, results)], rows)


def _reasons(results: Sequence[Result]) -> list[str]:
    """Return the reasons of all outcomes other than yes, by engine."""
    lines = []
    for one in results:
        by_reason: dict[str, list[str]] = {}
        for check, outcome in one["checks"].items():
            if ": " in outcome:
                by_reason.setdefault(outcome, []).append(check)
        lines += [f"* {_name(one)}, {_joined(checks)}: **{reason}**" for reason, checks in by_reason.items()]
    return [*lines, ""] if lines else []


def _levers() -> list[str]:
    rows = [[f"`{one.name}`", f"`{one.name}`", f"`{one.sglang}`" if one.sglang else "", one.instead] for one in LEVERS]
    return table(["ours", "vLLM", "SGLang", "with SGLang instead"], rows)


def _name(result: Result) -> str:
    return f"{_short_name(result)} on {'CPU' if result['device'] == 'CPU' else 'GPU'}"


def _short_name(result: Result) -> str:
    return f"{_NAMES[result['kind']]} {result['engine_version']}"


def _word(outcome: str) -> str:
    """Return `yes`, `no`, `not run` or `FAIL`, without the reason."""
    return outcome.partition(": ")[0]


def _joined(checks: Sequence[str]) -> str:
    return "; ".join(f"“{check}”" for check in checks)
