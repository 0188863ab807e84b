"""The stream of one prompt of which an update cuts samples off: what it has told of each, how their rests follow."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.engine import Json
from gateway.dialects.resumption.tokens import cut_off_at, joined_spans, was_cut_off
from gateway.dialects.spans import name_adapter, tell_weights
from gateway.fleet.adapters import Adapter
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica

_OF_THE_END = ("index", "finish_reason", "stop_reason", "weight_version", "weight_versions", "kv_versions")


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    spans: list[Json] = field(default_factory=list)
    has_ended: bool = False
    end: Json | None = None


class CutStream:
    """Sees each choice of each chunk before the client does, and marks its last one with its spans.

    `indexes` are those of the prompt's samples, as the client knows them; `resumes` says whether they may go on, and
    `read` are the prompt's token ids, where they are known before an engine tells them. `has_ids` is False where the
    engine tells no token ids.
    """

    def __init__(
        self,
        indexes: Sequence[int],
        adapter: Adapter | None,
        *,
        resumes: bool,
        read: Sequence[int] = (),
        has_ids: bool = True,
    ) -> None:
        self._has_ids = has_ids
        self._adapter = adapter
        self._may_resume = resumes
        self._samples = {index: _Sample() for index in indexes}
        self._prompt_token_ids = list(read)
        self.is_cut = False
        self._replica: Replica | None = None

    def told_prompt(self, token_ids: list[int] | None) -> None:
        """The prompt as the engine has read it, where it tells so beside its choices."""
        self._prompt_token_ids = token_ids or self._prompt_token_ids

    def see(self, choice: Json, replica: Replica, flight: Flight) -> bool:
        """Whether it is one that an update ends, and that goes on for the client, as it can.

        Its `weight_version` is that of the replica now; which ones made the tokens of a sample is told where it ends.
        """
        self._replica = replica
        sample, token_ids = self._samples[choice["index"]], choice.get("token_ids") or []
        sample.token_ids += token_ids
        self._prompt_token_ids = choice.get("prompt_token_ids") or self._prompt_token_ids
        choice["weight_version"] = replica.weight_version
        if choice.get("finish_reason") is not None:
            tell_weights(choice, flight, len(sample.token_ids) if self._has_ids else None)
        name_adapter(choice, self._adapter)
        if not (self._may_resume and self._prompt_token_ids and was_cut_off({"choices": [choice]}, replica)):
            sample.has_ended = choice.get("finish_reason") is not None
            return False
        sample.end = {key: choice[key] for key in _OF_THE_END if key in choice}
        self.is_cut, sample.spans = True, choice.pop("weight_versions")
        choice |= {"finish_reason": None, "stop_reason": None}
        choice.pop("kv_versions", None)
        return True

    def cut_off(self) -> dict[int, Json]:
        """The samples that have not ended where an update cut the stream, by index: what was read, and what was made.

        To be asked when the stream is over: engines tell nothing at all of a sample that they had not begun. Raises
        `EngineFailed` where there is such a one that cannot go on.
        """
        left = {index: sample for index, sample in self._samples.items() if not sample.has_ended}
        if left and not self.is_cut and self._replica is not None and self._replica.cuts_off:
            if not (self._may_resume and self._prompt_token_ids):
                raise cut_off_at(self._replica)
            self.is_cut = True
        if not self.is_cut:
            return {}
        return {
            index: {"prompt_token_ids": self._prompt_token_ids, "token_ids": sample.token_ids}
            for index, sample in left.items()
        }

    def ends(self) -> list[Json]:
        """How the samples have ended that were to go on and cannot, without the tokens that were told already.

        Raises `EngineFailed` where there is one of which nothing was told.
        """
        left = [sample for sample in self._samples.values() if not sample.has_ended]
        if self._replica is not None and any(sample.end is None for sample in left):
            raise cut_off_at(self._replica)
        return [sample.end for sample in left if sample.end is not None]

    def follow(self, choice: Json) -> None:
        """A choice of the stream of a sample's rest, as it goes on."""
        sample = self._samples[choice["index"]]
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None  # told before
        if choice.get("finish_reason") is not None:
            rest = choice["weight_versions"]
            choice["weight_versions"] = joined_spans(sample.spans, rest, len(sample.token_ids))

    def usage(self, first: Json, rests: Json) -> Json:
        """The usage of the whole: the prompt is counted once, and what was read again not at all."""
        made = sum(len(sample.token_ids) for sample in self._samples.values()) + rests["completion_tokens"]
        return {**first, "completion_tokens": made, "total_tokens": (first.get("prompt_tokens") or 0) + made}
