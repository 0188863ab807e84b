"""The part of each sample that the stream of a conversation delivered before the sample was cut off.

vLLM's parsers hold text back until they can classify it, and release it with the sample's last chunk, also where that
is a cut. So the last chunk of a cut-off sample is kept here, and the chunks before are recorded as a parser has to see
them again.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from engines.engine import Json


@dataclass(slots=True)
class DeliveredSample:
    """The tokens of each delivered chunk, the ids of its tool calls, and the chunk that the sample was cut off with."""

    chunks: list[list[int]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    kept: Json | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk]

    def resumed(self, state: Json) -> Json:
        """vLLM's state of this text (`DerenderStreamState`), corrected for the chunks as they were delivered.

        `state` is vLLM's for all delivered tokens as one chunk. Without a parser it holds no tokens and is right.
        """
        if not state.get("output_token_ids"):
            return state
        lengths = [len(chunk) for chunk in self.chunks]
        calls = {"tools_streamed": bool(self.call_ids), "last_tool_call_ids": self.call_ids}
        return state | {"output_chunk_lens": lengths} | calls


class DeliveredChat:
    """Records each choice of each chunk before the client gets it."""

    def __init__(self) -> None:
        self.samples: dict[int, DeliveredSample] = defaultdict(DeliveredSample)

    def see(self, choice: Json) -> None:
        """Record a choice that is delivered."""
        sample = self.samples[choice["index"]]
        if token_ids := choice.get("token_ids"):
            sample.chunks.append(list(token_ids))
        calls = choice["delta"].get("tool_calls") or ()
        sample.call_ids += [call["id"] for call in calls if call.get("id")]

    def keep(self, choice: Json) -> None:
        """Hold back the choice that a sample was cut off with."""
        self.samples[choice["index"]].kept = choice

    @property
    def kept(self) -> list[Json]:
        return [sample.kept for sample in self.samples.values() if sample.kept is not None]
