"""Precision and recall of the rule about keys, against Hydra's own verdicts.

`verl_trial/hydra_verdicts.json` has the keys that verl's example scripts give, by release and trainer, and Hydra's
verdict on each: those of 0.4.1 to 0.7.0 by the release they belong to, those of 0.7.0 and of January 2026 by 0.9.1 too.
`verl_trial/hydra_verdicts.py` asked it.
"""

import json
from pathlib import Path

from gateway.tuning.doctor.files.hydra_override import parsed_override
from gateway.tuning.doctor.known_keys import Composition, verl_keys

VERDICTS = json.loads((Path(__file__).parent / "verl_trial" / "hydra_verdicts.json").read_text(encoding="utf-8"))


def is_refused(release: str, trainer: str, word: str) -> bool:
    override = parsed_override(word)
    assert override is not None
    return bool(Composition(verl_keys(trainer, release)).refusal(override))


def test_keys_are_refused_where_hydra_refuses_them() -> None:
    rows = [
        (release, trainer, word, verdict == "refused")
        for release, trainers in VERDICTS.items()
        for trainer, verdicts in trainers.items()
        for verdict, words in verdicts.items()
        for word in words
    ]
    said = {row: is_refused(*row[:3]) for row in rows}
    false = [row for row, refused in said.items() if refused and not row[3]]
    missed = [row for row, refused in said.items() if not refused and row[3]]
    true = sum(refused and row[3] for row, refused in said.items())
    assert len(rows) > 4000
    assert true / (true + len(false)) >= 0.98, false
    assert true / (true + len(missed)) >= 0.95, missed
