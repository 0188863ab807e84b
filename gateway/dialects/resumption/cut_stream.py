"""Follows the stream of one prompt whose samples may be cut off, and joins the rests to what was delivered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engines.engine import Json
from engines.errors import EngineFailed
from gateway.dialects.replies.carried import num_unscored, opened
from gateway.dialects.resumption.features import MARK
from gateway.dialects.resumption.tokens import cut_off_at, joined_spans, shifted, was_cut_off
from gateway.dialects.spans import UNSCORED, name_adapter, spans_so_far, stamp_choice
from gateway.fleet.adapters import Adapter
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica

SO_FAR = "weight_versions_so_far"
"""The spans of a sample in a choice before its last, for records; no client sees it."""
_OF_THE_END = ("index", "finish_reason", "stop_reason", "weight_version", "weight_versions", "kv_versions", UNSCORED)


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    report: list[Json] = field(default_factory=list)
    """The engine's last report of the spans."""
    spans: list[Json] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    num_characters: int = 0
    num_unscored: int = 0
    shows_prompt: bool = False
    has_ended: bool = False
    end: Json | None = None


class CutStream:
    """Sees each choice of each chunk before the client does, and marks the last choice of a sample with its spans.

    `indexes` number the samples as the client knows them. `inexact` are the fields with which samples that continue are
    marked; None if they may not continue from their tokens.
    `read` are the prompt's token ids, if they are known before an engine reports them. `has_ids` is False if the engine
    reports no token ids. `keeps_record` is True where each choice before a sample's last has its spans so far.
    """

    def __init__(
        self,
        indexes: Sequence[int],
        adapter: Adapter | None,
        *,
        inexact: Sequence[str] | None,
        read: Sequence[int] = (),
        has_ids: bool = True,
        keeps_record: bool = False,
    ) -> None:
        self._has_ids = has_ids
        self._keeps_record = keeps_record
        self._adapter = adapter
        self._may_resume = inexact is not None
        self._marks = {MARK: list(inexact)} if inexact else {}
        self._samples = {index: _Sample() for index in indexes}
        self._prompt_token_ids = list(read)
        self.is_cut = False
        self._replica: Replica | None = None

    def read_prompt(self, token_ids: list[int] | None) -> None:
        """Note the prompt as the engine read it, if it reports that beside its choices."""
        self._prompt_token_ids = token_ids or self._prompt_token_ids

    @property
    def is_whole(self) -> bool:
        """True if all samples have ended, uncut."""
        return not self.is_cut and all(sample.has_ended for sample in self._samples.values())

    @property
    def num_made(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self._samples.values())

    @property
    def num_unscored(self) -> int:
        """Tokens of all samples without a log-prob, where log-probs are asked for."""
        return sum(sample.num_unscored for sample in self._samples.values())

    def see(self, choice: Json, replica: Replica, flight: Flight) -> bool:
        """Record a choice. True if an update ends its sample and the sample continues for the client.

        Its `weight_version` is the replica's now; the spans of all its tokens come with the last choice of the sample.
        """
        self._replica = replica
        sample, token_ids = self._samples[choice["index"]], choice.get("token_ids") or []
        sample.token_ids += token_ids
        sample.num_characters += len(choice.get("text") or "")
        sample.shows_prompt |= bool(choice.get("prompt_token_ids") or token_ids)
        self._prompt_token_ids = choice.get("prompt_token_ids") or self._prompt_token_ids
        choice["weight_version"] = replica.weight_version
        sample.num_unscored += num_unscored(choice)
        if choice.get("finish_reason") is not None:
            stamp_choice(choice, flight, len(sample.token_ids) if self._has_ids else None)
            choice |= {UNSCORED: sample.num_unscored} if sample.num_unscored else {}
        else:
            sample.report = choice.pop("weight_versions", None) or sample.report
        name_adapter(choice, self._adapter)
        if self._keeps_record and choice.get("finish_reason") is None:
            choice[SO_FAR] = self._so_far(sample, flight)["weight_versions"]
        if not (self._may_resume and self._prompt_token_ids and was_cut_off({"choices": [choice]}, replica)):
            sample.has_ended = choice.get("finish_reason") is not None
            return False
        sample.end = {key: choice[key] for key in _OF_THE_END if key in choice}
        self.is_cut, sample.spans = True, choice.pop("weight_versions")
        if self._keeps_record:
            choice[SO_FAR] = sample.spans
        choice.pop(UNSCORED, None)
        choice |= {"finish_reason": None, "stop_reason": None}
        sample.kv_versions = choice.pop("kv_versions", [])
        return True

    def interrupt(self, flight: Flight) -> bool:
        """The replica has failed. True if the samples that have not ended continue from the tokens delivered.

        A stream lacks no more than its usage if all samples have ended; without token ids that is unknown.
        """
        left = [sample for sample in self._samples.values() if not sample.has_ended]
        if not left:
            self.is_cut = self._has_ids
            return True
        if not (self._may_resume and self._prompt_token_ids and self.num_made):
            return False
        for sample in left:
            so_far = self._so_far(sample, flight)
            sample.spans, sample.kv_versions = so_far["weight_versions"], so_far["kv_versions"]
        self.is_cut = True
        return True

    @property
    def lacks_aborted(self) -> bool:
        """True where a stream is over and has no end of a sample. vLLM sends none of an aborted one without tokens."""
        return any(not sample.token_ids for sample in self._without_end)

    def check_ends(self) -> None:
        """Raise `EngineFailed` where a stream is over and has tokens of a sample, and not its end."""
        if (
            self._replica is not None
            and (made := [len(sample.token_ids) for sample in self._without_end])
            and max(made)
        ):
            raise EngineFailed(
                f"the stream ended before a sample did, after {max(made)} tokens", replica_id=self._replica.replica_id
            )

    @property
    def _without_end(self) -> list[_Sample]:
        """Samples that have not ended when the stream is over; none where an update has cut off what is left."""
        if self.is_cut or (self._replica is not None and self._replica.cuts_off):
            return []
        return [sample for sample in self._samples.values() if not sample.has_ended]

    def end(self, bare: Json, flight: Flight | None) -> Json:
        """End the samples that have not ended while no replica has them.

        `bare` is a chunk that ends all samples without tokens; `flight` is the last one.
        """
        self.is_cut, ends = True, []
        for choice in bare["choices"]:
            sample = self._samples[choice["index"]]
            if sample.has_ended:
                continue
            sample.has_ended = True
            if flight is not None and (sample.token_ids or not self._has_ids):
                choice |= self._so_far(sample, flight)
                choice |= {key: None for key in ("prompt_token_ids",) if key in choice}
            ends.append(choice)
        return bare | {"choices": ends, "usage": self.usage(bare["usage"], {"completion_tokens": 0})}

    def restore(self, parts: Mapping[int, Json]) -> None:
        """Take the first parts of samples, by index, from the record of a gateway before this one."""
        for index, part in parts.items():
            sample = _Sample(list(part["token_ids"]), spans=list(part["weight_versions"]))
            sample.num_characters = len(part["text"])
            self._samples[index] = sample
            self.read_prompt(part["prompt_token_ids"])
        self.is_cut = True

    def _so_far(self, sample: _Sample, flight: Flight) -> Json:
        """The stamps of a sample that ends here, or continues elsewhere."""
        end: Json = {}
        if self._has_ids:
            end["weight_versions"] = spans_so_far(sample.report, len(sample.token_ids))
        stamp_choice(end, flight, len(sample.token_ids) if self._has_ids else None)
        name_adapter(end, self._adapter)
        return end

    def cut_off(self) -> dict[int, Json]:
        """The samples that an update cut off, by index, each with its prompt's and its own token ids.

        Call it when the stream is over: engines send no chunk for a sample that they had not begun. Raises
        `EngineFailed` if a sample can neither continue nor end.
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
        """The ends of the samples that were to continue and cannot, without the tokens that were delivered already.

        Raises `EngineFailed` if nothing was delivered of a sample.
        """
        left = [sample for sample in self._samples.values() if not sample.has_ended]
        if self._replica is not None and any(sample.end is None for sample in left):
            raise cut_off_at(self._replica)
        return [sample.end for sample in left if sample.end is not None]

    def follow(self, choice: Json) -> None:
        """Adjust a choice of the stream of a sample's rest: its spans and the offsets of its text begin where the first
        part ended."""
        sample = self._samples[choice["index"]]
        if sample.shows_prompt and "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None  # delivered before
        if logprobs := opened(choice.get("logprobs")):
            choice["logprobs"] = shifted(logprobs, sample.num_characters)
        if SO_FAR in choice:
            choice[SO_FAR] = joined_spans(sample.spans, choice[SO_FAR], len(sample.token_ids))
            choice |= self._marks
        if choice.get("finish_reason") is not None:
            if unscored := sample.num_unscored + choice.get(UNSCORED, 0):
                choice[UNSCORED] = unscored
            rest = choice["weight_versions"]
            choice["weight_versions"] = joined_spans(sample.spans, rest, len(sample.token_ids))
            if sample.kv_versions:  # a rest without tokens has none of its own
                choice.setdefault("kv_versions", sample.kv_versions)
            choice |= self._marks

    def usage(self, first: Json, rests: Json) -> Json:
        """The usage of the whole: the prompt is counted once, and tokens that were read again are not counted."""
        made = self.num_made + rests["completion_tokens"]
        read = first.get("prompt_tokens") or len(self._prompt_token_ids)
        return {**first, "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
