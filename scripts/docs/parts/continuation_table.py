"""The table of fields in docs/design/rollouts.md, from `gateway/dialects/resumption.py`."""

from gateway.dialects.resumption import FEATURES, Feature

BEGIN, END = "<!-- features: made by python -m scripts.docs -->\n", "<!-- end of features -->\n"
_HEAD = "| field of a request | after a break | reason |\n| --- | --- | --- |\n"
_OTHERS = "| any other field | restarted | it is not known to be harmless |\n"


def continuation_table() -> str:
    """A head, a row for each feature, and the rule for fields that no feature names."""
    return f"\n{_HEAD}{''.join(map(_row, FEATURES))}{_OTHERS}\n"


def _row(feature: Feature) -> str:
    fields = ", ".join(f"`{field}`" for field in feature.fields)
    return f"| {fields} | {feature.outcome} | {feature.reason} |\n"
