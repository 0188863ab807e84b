"""Rules about a body's fields that the dialects share: sampling, what a replica can do, the salt of prefix caches."""

from uuid import uuid4

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.fleet.adapters import Adapter
from gateway.fleet.replica import Replica


def check_sampling(body: Json, max_n: int) -> int:
    """The number of samples. Raises `InvalidRequest` for fields that every engine would refuse."""
    n, temperature = body.get("n", 1), body.get("temperature", 1.0)
    if "prompt_embeds" in body:
        raise InvalidRequest("prompt_embeds is refused: tensors are not read from requests", param="prompt_embeds")
    if type(n) is not int or not 1 <= n <= max_n:
        raise InvalidRequest(f"n = {n!r} is not between 1 and gateway.max_n = {max_n}", param="n")
    if n > 1 and temperature == 0:
        raise InvalidRequest(f"n = {n} with temperature = 0 would repeat one completion: use n = 1", param="n")
    for field in ("max_tokens", "max_completion_tokens"):
        limit = body.get(field)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidRequest(f"{field} = {limit!r} must be a whole number of at least 1", param=field)
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, dict) and body.get("stream")):
        raise InvalidRequest("stream_options is an object that goes with stream = true alone", param="stream_options")
    return n


def check_replica(body: Json, replica: Replica) -> None:
    """Raise `InvalidRequest` for fields that this replica's server does not support."""
    if body.get("return_token_ids") and not replica.info.speaks_vllm:
        raise InvalidRequest(
            f"return_token_ids is set, but replica {replica.replica_id} is the server at {replica.info.url}, which is "
            "no vLLM and gives none",
            param="return_token_ids",
        )


def versioned_salt(body: Json, version: int | None, adapter: Adapter | None = None) -> str:
    """A salt per weight version: prefix KV of other weights would be a silent mixture.

    A request that is sent during an update (`version` None) shares no prefix: the next request may meet other weights.
    vLLM 0.32 keys prefixes by an adapter's name and path, which do not tell two loads of it apart; the salt does.
    """
    loaded = f"a{adapter.load_id}" if adapter else ""
    held = uuid4().hex if version is None else version
    return f"{body.get('cache_salt') or ''}v{held}{loaded}"
