"""Stamps a sample with the weight versions of its tokens and of the KV under them."""

from collections.abc import Sequence
from functools import lru_cache

from engines.engine import Json
from engines.weight_label import WeightLabel
from gateway.fleet.adapters import Adapter
from gateway.fleet.replica import Flight

UNSCORED = "missing_logprobs"
"""The field of a choice with the number of its tokens for which the engine gave no finite log-prob; absent if none."""
_LIMITS = ("start", "end")
_version_of = lru_cache(64)(lambda label: WeightLabel.read(label).version)


def stamps(
    report: Sequence[Json], flight: Flight, num_tokens: int | None, adapter: Adapter | None = None
) -> tuple[list[Json], list[int]]:
    """The weight versions of a sample's tokens, and those of its KV. The engine's own report comes first.

    An engine reports a version with its first token, so the tokens after a report are of the report's last version. Its
    label changes at a commit, and its weights do not.

    Without a report a request that met one version has one span. A request that met several has them all, without
    limits: tokens arrive late, and the engine alone knows when it made them. `num_tokens` is None if it is unknown.
    Call it after `Replica.vouched`.
    """
    spans: list[Json] = []
    for span in report:
        if num_tokens is not None and span["start"] >= num_tokens:
            break
        version = _version_of(span["version"])
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = span["end"]
        else:
            spans.append({**span, "version": version})
    versions = flight.versions
    if spans:
        spans[-1]["end"] = spans[-1]["end"] if num_tokens is None else num_tokens
    elif len(versions) == 1:
        spans = [{"version": versions[0], "start": 0, "end": num_tokens}]
    elif num_tokens != 0:
        spans = [{"version": version, "start": None, "end": None} for version in versions]
    kv_versions = flight.kv_versions(spans)
    if adapter is not None:  # its tokens are of its version; a span keeps the model's own
        for span in spans:
            span |= {"version": adapter.version, "base_version": span["version"], "adapter": adapter.name}
    return spans, kv_versions


def joined_spans(first: list[Json], rest: list[Json], kept: int) -> list[Json]:
    """Spans over both parts: the first as far as `kept`, then the rest. A version without limits is named once."""
    spans: list[Json] = []
    cut = ({**span, "end": None if span["end"] is None else min(span["end"], kept)} for span in first if kept)
    moved = ({**span, **{key: _plus(span[key], kept) for key in _LIMITS}} for span in rest)
    for span in (*cut, *moved):
        if span["end"] is not None and span["start"] >= span["end"]:
            continue
        if spans and _follows(span, spans[-1]):
            spans[-1]["end"] = span["end"]
        elif span not in spans:
            spans.append(span)
    return spans


def _follows(span: Json, before: Json) -> bool:
    """True if the same weights made both spans, one right after the other."""
    is_next = span["start"] is not None and span["start"] == before["end"]
    return is_next and before == {**span, **{key: before[key] for key in _LIMITS}}


def _plus(limit: int | None, tokens: int) -> int | None:
    return None if limit is None else limit + tokens
