"""The table of fields in docs/design/rollouts.md has a row for each feature of the code."""

from gateway.dialects.resumption.features import FEATURES
from scripts.docs.parts.continuation_table import continuation_table


def test_each_field_of_the_code_has_its_outcome_in_the_table() -> None:
    rows = [row.split(" | ") for row in continuation_table().strip().splitlines()[2:]]
    told = {field.strip("`| "): outcome for fields, outcome, _ in rows for field in fields.split(", ")}
    assert told == {field: str(one.outcome) for one in FEATURES for field in one.fields} | {
        "any other field": "restarted"
    }
