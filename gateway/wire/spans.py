"""Which weights made the tokens of a streamed reply: told with the last chunk of each sample."""

from dataclasses import dataclass, field

from engines.engine import Json
from engines.vllm_engine import version_number


@dataclass(slots=True)
class _Seen:
    tokens: int = 0
    versions: list[int | None] = field(default_factory=list)


class StreamSpans:
    """Counts the tokens of each sample and notes the versions that its chunks came with."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def stamp(self, choice: Json, num_tokens: int) -> None:
        """Give the last chunk of a sample its `weight_versions`; `weight_version` is that of the replica just now.

        As in a whole reply: the engine's own where it tells them; else one span where the version never changed, and
        the versions without limits where it did, since the engine alone knows at which token.
        """
        seen = self._seen.setdefault(choice["index"], _Seen())
        seen.tokens += num_tokens
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
