"""The table of failed starts."""

from engines.process.diagnosis import causes
from scripts.docs.parts.causes_table import causes_table


def test_each_known_cause_has_a_row_with_keys_and_no_placeholders() -> None:
    rows = causes_table()
    assert "{" not in rows.replace("`{", "")
    assert rows.count("\n|") - 2 == len({(cause.meaning, cause.remedy, cause.may_pass) for cause in causes()})
    assert (
        "| the model's attention heads cannot be split evenly over the GPUs of a replica | set engine.tensor_" in rows
    )
