"""Which weights made the tokens of a reply, and the KV under them: in a stream told with each sample's last chunk."""

from dataclasses import dataclass, field

from engines.engine import Json
from engines.vllm_engine import version_number
from gateway.adapters import Adapter
from gateway.flight import Flight


@dataclass(slots=True)
class _Seen:
    tokens: int | None = 0
    versions: list[int | None] = field(default_factory=list)


class StreamSpans:
    """Counts the tokens of each sample and notes the versions that its chunks came with."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def stamp(self, choice: Json, num_tokens: int | None) -> None:
        """Give the last chunk of a sample its `weight_versions`; `weight_version` is that of the replica just now.

        As in a whole reply: the engine's own where it tells them; else one span where the version never changed, and
        the versions without limits where it did, since the engine alone knows at which token. `num_tokens` is None
        where nobody says how many there are.
        """
        seen = self._seen.setdefault(choice["index"], _Seen())
        seen.tokens = None if seen.tokens is None or num_tokens is None else seen.tokens + num_tokens
        if (version := choice.get("weight_version")) not in seen.versions:
            seen.versions.append(version)
        if choice.get("finish_reason") is None:
            return
        if spans := choice.get("weight_versions"):
            choice["weight_versions"] = [{**span, "version": version_number(str(span["version"]))} for span in spans]
        elif len(seen.versions) == 1:
            choice["weight_versions"] = [{"version": version, "start": 0, "end": seen.tokens}]
        else:
            choice["weight_versions"] = [{"version": one, "start": None, "end": None} for one in seen.versions]


def stamp_versions(answer: Json, flight: Flight, ended: int, adapter: Adapter | None = None) -> None:
    """Say which weights made the tokens of each choice, and the KV under them: in the engine's words where it says so.

    Otherwise one span where the version was the same at both ends. Where it was not, the update fell inside, at a token
    that the engine alone knows: both versions are named, without limits.
    """
    began = flight.began
    for choice in answer["choices"]:
        if choice.get("weight_versions"):
            number_versions(choice)
        elif began == ended:
            choice["weight_versions"] = [{"version": began, "start": 0, "end": _token_count(answer, choice)}]
        else:
            choice["weight_versions"] = [{"version": version, "start": None, "end": None} for version in (began, ended)]
        choice["kv_versions"] = flight.kv_versions(choice)
        name_adapter(choice, adapter)


def tell_kv(choice: Json, flight: Flight) -> None:
    """With the last chunk of a sample: the versions of the KV under its last token."""
    if choice.get("finish_reason") is not None:
        choice["kv_versions"] = flight.kv_versions(choice)


def number_versions(choice: Json) -> None:
    """The engine's own spans, with our numbers in the place of its labels."""
    for span in choice.get("weight_versions") or ():
        span["version"] = version_number(span["version"])


def _token_count(answer: Json, choice: Json) -> int | None:
    """Tokens of one choice. Without token ids the usage tells them, which counts all choices together."""
    if choice.get("token_ids") is not None:
        return len(choice["token_ids"])
    return (answer.get("usage") or {}).get("completion_tokens") if len(answer["choices"]) == 1 else None


def name_adapter(choice: Json, adapter: Adapter | None) -> None:
    """Tokens of an adapter are of its version; a span keeps the model's own as `base_version`."""
    if adapter is None:
        return
    if "weight_version" in choice:
        choice["weight_version"] = adapter.version
    for span in choice.get("weight_versions") or ():
        span |= {"version": adapter.version, "base_version": span["version"], "adapter": adapter.name}
