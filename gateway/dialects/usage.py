"""Token counts of one request, and the chunks of a stream that carry them."""

from engines.engine import Json


class Usage:
    """Token counts over the prompts of one request."""

    def __init__(self) -> None:
        self._by_prompt: dict[int, Json] = {}

    def add_chunk(self, index: int, usage: Json | None) -> None:
        """Count prompt `index`; a later count of the same prompt replaces an earlier count."""
        if usage:
            self._by_prompt[index] = usage

    def total(self) -> Json:
        read = made = cached = 0
        total: Json = {}
        for usage in self._by_prompt.values():
            read += usage.get("prompt_tokens") or 0
            made += usage.get("completion_tokens") or 0
            if details := usage.get("prompt_tokens_details"):
                cached += details.get("cached_tokens") or 0
                total["prompt_tokens_details"] = {"cached_tokens": cached}
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made} | total


def wants_usage(body: Json) -> bool:
    """True if a stream ends with a chunk that has its usage and no choices."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def with_usage_rule(chunk: Json, body: Json) -> Json:
    """A chunk before the last: its usage is null where the last chunk has it, unless every chunk is to have it."""
    if not (body.get("stream_options") or {}).get("continuous_usage_stats"):
        chunk.pop("usage", None)
    return chunk | {"usage": chunk.get("usage")} if wants_usage(body) else chunk
