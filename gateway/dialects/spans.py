"""Which weights made the tokens of a sample, and the KV under them: told where it ends."""

from engines.clients.vllm_engine import version_number
from engines.engine import Json
from gateway.fleet.adapters import Adapter
from gateway.fleet.flight import Flight


def stamp_versions(answer: Json, flight: Flight, adapter: Adapter | None = None) -> None:
    """Say of each choice of a whole reply which weights made it. To be called when the replica has vouched for it."""
    for choice in answer["choices"]:
        tell_weights(choice, flight, _token_count(answer, choice))
        name_adapter(choice, adapter)


def tell_weights(choice: Json, flight: Flight, num_tokens: int | None) -> None:
    """Give a choice that ends its `weight_versions` and `kv_versions`: in the engine's words where it says so.

    Otherwise one span where its request has met one version. Where it has met more, each may have made any token, since
    tokens come late, and the engine alone knows when it made them: all are named, without limits. `num_tokens` is None
    where nobody says how many there are.
    """
    if choice.get("weight_versions"):
        for span in choice["weight_versions"]:
            span["version"] = version_number(span["version"])
    elif len(flight.versions) == 1:
        choice["weight_versions"] = [{"version": flight.versions[0], "start": 0, "end": num_tokens}]
    else:
        choice["weight_versions"] = [{"version": one, "start": None, "end": None} for one in flight.versions]
    choice["kv_versions"] = flight.kv_versions(choice)


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
