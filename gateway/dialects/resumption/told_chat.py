"""What the stream of a conversation has told of each sample until an update cut it off.

Parsers of vLLM's hold text back until they know what it is, and tell it with the end, also where the end is none. So
the last chunk of what was cut off is kept here, and the ones before are noted as a parser has to see them again.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from engines.engine import Json


@dataclass(slots=True)
class ToldSample:
    """The tokens of each chunk that was told, the ids of its tool calls, and the chunk that it was cut off with."""

    chunks: list[list[int]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    kept: Json | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk]

    def resumed(self, state: Json) -> Json:
        """vLLM's state of this text (`DerenderStreamState`), which it gave for all told tokens as one chunk.

        Without a parser it holds no tokens, and is right as it is.
        """
        if not state.get("output_token_ids"):
            return state
        lengths = [len(chunk) for chunk in self.chunks]
        calls = {"tools_streamed": bool(self.call_ids), "last_tool_call_ids": self.call_ids}
        return state | {"output_chunk_lens": lengths} | calls


class ToldChat:
    """Sees each choice of each chunk before the client does."""

    def __init__(self) -> None:
        self.samples: dict[int, ToldSample] = defaultdict(ToldSample)

    def see(self, choice: Json) -> None:
        """A choice that is told."""
        sample = self.samples[choice["index"]]
        if token_ids := choice.get("token_ids"):
            sample.chunks.append(list(token_ids))
        calls = choice["delta"].get("tool_calls") or ()
        sample.call_ids += [call["id"] for call in calls if call.get("id")]

    def keep(self, choice: Json) -> None:
        """The choice that a sample was cut off with."""
        self.samples[choice["index"]].kept = choice

    @property
    def kept(self) -> list[Json]:
        return [sample.kept for sample in self.samples.values() if sample.kept is not None]
