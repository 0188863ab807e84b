"""Stamps a sample with the weight versions of its tokens and of the KV under them."""

from engines.engine import Json
from engines.weight_label import WeightLabel
from gateway.dialects.replies.carried import num_tokens, num_unscored
from gateway.fleet.adapters import Adapter
from gateway.fleet.flight import Flight

UNSCORED = "missing_logprobs"
"""The field of a choice with the number of its tokens for which the engine gave no finite log-prob; absent if none."""


def spans_so_far(report: list[Json], num_tokens: int) -> list[Json]:
    """The spans of the first `num_tokens` tokens of a sample, by the engine's last report, as it wrote them.

    An engine reports a version with its first token, so the tokens after a report are of the report's last version.
    """
    spans = [span for span in report if span["start"] < num_tokens]
    return [*spans[:-1], *({**last, "end": num_tokens} for last in spans[-1:])]


def stamp_versions(answer: Json, flight: Flight, adapter: Adapter | None = None) -> None:
    """Stamp each choice of a whole reply. Call it after `Replica.vouched`."""
    for choice in answer["choices"]:
        stamp_choice(choice, flight, _token_count(answer, choice))
        name_adapter(choice, adapter)


def stamp_choice(choice: Json, flight: Flight, num_tokens: int | None) -> None:
    """Set `weight_versions` and `kv_versions` of a choice that ends; the engine's own report comes first.

    Without a report a request that met one version has one span. A request that met several has them all, without
    limits: tokens arrive late, and the engine alone knows when it made them. `num_tokens` is None if it is unknown.
    """
    if spans := choice.get("weight_versions"):
        choice["weight_versions"] = _of_versions(spans)
    elif len(flight.versions) == 1:
        choice["weight_versions"] = [{"version": flight.versions[0], "start": 0, "end": num_tokens}]
    elif num_tokens == 0:
        choice["weight_versions"] = []
    else:
        choice["weight_versions"] = [{"version": version, "start": None, "end": None} for version in flight.versions]
    choice["kv_versions"] = flight.kv_versions(choice)


def _of_versions(report: list[Json]) -> list[Json]:
    """The spans of an engine's report by version: its label changes at a commit, and its weights do not."""
    spans: list[Json] = []
    for span in report:
        version = WeightLabel.read(span["version"]).version
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = span["end"]
        else:
            spans.append({**span, "version": version})
    return spans


def mark_unscored(choice: Json) -> int:
    """Mark a whole choice with the number of its tokens that lack log-probs, and return it."""
    if unscored := num_unscored(choice):
        choice[UNSCORED] = unscored
    return unscored


def _token_count(answer: Json, choice: Json) -> int | None:
    """Tokens of one choice. Without token ids it is the usage, which counts all choices together."""
    if choice.get("token_ids") is not None:
        return num_tokens(choice["token_ids"])
    return (answer.get("usage") or {}).get("completion_tokens") if len(answer["choices"]) == 1 else None


def name_adapter(choice: Json, adapter: Adapter | None) -> None:
    """Stamp the tokens of an adapter with its version; a span keeps the model's own version as `base_version`."""
    if adapter is None:
        return
    if "weight_version" in choice:
        choice["weight_version"] = adapter.version
    for span in choice.get("weight_versions") or ():
        span |= {"version": adapter.version, "base_version": span["version"], "adapter": adapter.name}
