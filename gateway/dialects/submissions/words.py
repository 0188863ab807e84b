"""The fields of `POST /v1/rollouts`: groups with their defaults, checked before any of them runs."""

import asyncio
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

import numpy as np
import orjson

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.dialects.sampling import MAX_PROMPTS

_SHARED = (
    "model", "n", "need", "deadline_s", "on_deadline", "sampling", "min_version", "max_staleness", "priority",
    "expected_tokens",
)  # fmt: skip
_OWN = ("id", "groups", "stream")
_OF_GROUPS = ("prompt", "messages", "resume", "session_id", "parent", "tools", "chat_template_kwargs")
_SOURCES = ("prompt", "messages", "resume")
_OF_RESUMED = ("resume", "need", "deadline_s", "on_deadline", "min_version", "max_staleness", "priority")
# Fields of /v1/completions that have another place here, or that no stream has.
_NOT_SAMPLING = (
    "prompt", "messages", "model", "n", "stream", "stream_options", "return_token_ids", "min_version", "max_staleness",
    "session_id", "priority", "request_id", "expected_tokens", "echo", "suffix", "best_of", "use_beam_search",
    "length_penalty", "prompt_logprobs", "prompt_embeds",
)  # fmt: skip
_ID = re.compile(r"\w[\w.:@+=~-]{0,255}", re.ASCII)
_LONGEST_TEXT = 256
_LONGEST_DEADLINE_S = 30 * 86400.0
_MOST_PRIORITY = 1_000_000
_MOST_SAMPLES = 1 << 19
_AT_ONCE = 200  # groups
_GROUP_BYTES = 300


class OnDeadline(StrEnum):
    """The treatment of samples that are open at their group's deadline."""

    CANCEL = "cancel"
    RETURN_PARTIAL = "return_partial"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class SampleName:
    """One sample of a submission of the same owner."""

    id: str
    group: int
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt with its n samples, of which `need` are enough.

    `prompt` is text or token ids; None where `messages` are to be rendered.
    `done` are samples that another submission has delivered.
    """

    n: int
    need: int
    sampling: Json
    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[Json] | None = None
    rendering: Json = field(default_factory=dict)
    deadline_s: float | None = None
    on_deadline: OnDeadline = OnDeadline.CANCEL
    session_id: str = ""
    parent: SampleName | None = None
    min_version: int | None = None
    max_staleness: int | None = None
    priority: int = 0
    expected_tokens: int | None = None
    done: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory: a list of token ids has an object for each distinct one."""
        prompt = self.prompt or ""
        size = len(prompt) if isinstance(prompt, str) else 8 * len(prompt) + 32 * len(set(prompt))
        return _GROUP_BYTES + size + (len(orjson.dumps(self.messages)) if self.messages else 0)

    def body(self, prompt: str | list[int]) -> Json:
        """The body of /v1/completions that asks for this group's samples."""
        asked = {
            "model": self.model,
            "min_version": self.min_version,
            "max_staleness": self.max_staleness,
            "expected_tokens": self.expected_tokens,
        }
        given = {key: value for key, value in asked.items() if value is not None}
        return {**self.sampling, **given, "prompt": [prompt], "n": self.n, "return_token_ids": True}

    def resumed(self, done: tuple[int, ...], num_good: int, asked: "Resumption") -> "Group":
        """The group that goes on without the samples `done`, of which `num_good` counted towards `need`."""
        left = self.n - len(done)
        need = max(1, min(left, self.need - num_good)) if asked.need is None else asked.need
        if need > left:
            raise InvalidRequest(f"need = {need} is more than the {left} samples that are open", param="need")
        return replace(self, done=done, need=need, **asked.changes)

    @classmethod
    def restored(cls, stored: Json) -> "Group":
        """Return the group out of its fields, as JSON has them."""
        parent = stored["parent"] and SampleName(**stored["parent"])
        done, on_deadline = tuple(stored["done"]), OnDeadline(stored["on_deadline"])
        return cls(**{**stored, "parent": parent, "done": done, "on_deadline": on_deadline})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A group that takes over the open samples of a suspended group. None stands for the suspended group's value."""

    id: str
    group: int
    need: int | None
    changes: Json


Asked = Group | Resumption


async def read_groups(body: Json) -> list[Asked]:
    """Return the groups of a request. Raise `InvalidRequest` with the field. Others get turns on the loop meanwhile."""
    _refuse_unknown(body, (*_OWN, *_SHARED), "")
    groups = body.get("groups")
    if not isinstance(groups, list) or not groups:
        raise InvalidRequest(f"groups is {_kind(groups)}: send a list of at least one group", param="groups")
    if len(groups) > MAX_PROMPTS:
        raise InvalidRequest(
            f"groups has {len(groups)} groups, more than {MAX_PROMPTS}: send fewer at a time",
            param="groups",
        )
    shared = {key: body[key] for key in _SHARED if key in body}
    read: list[Asked] = []
    for index, group in enumerate(groups):
        read.append(_group(f"groups[{index}]", group, shared))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    samples = sum(group.n for group in read if isinstance(group, Group))
    if samples > _MOST_SAMPLES:
        raise InvalidRequest(f"the groups have {samples} samples, more than {_MOST_SAMPLES}: send fewer at a time")
    return read


def read_id(body: Json) -> str:
    """Return the submission's id, random unless it is given."""
    given = body.get("id")
    if given is None:
        return uuid.uuid4().hex
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise InvalidRequest(
            f"id = {given!r:.80} must be 1 to 256 letters, digits and characters of . _ : @ + = ~ -, with a letter, a "
            "digit or _ first",
            param="id",
        )
    return given


def _group(where: str, given: Any, shared: Json) -> Asked:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} is {_kind(given)}: send an object", param=where)
    _refuse_unknown(given, (*_OF_GROUPS, *_SHARED), f"{where}.")
    source = [name for name in _SOURCES if given.get(name) is not None]
    if len(source) != 1:
        found = " and ".join(source) or "none"
        raise InvalidRequest(f"{where} has {found} of prompt, messages and resume: send one", param=f"{where}.prompt")
    if source == ["resume"]:
        return _resumption(where, given, shared)
    asked = {**shared, **given}
    fields = _Fields(where, asked)
    n = 1 if asked.get("n") is None else fields.whole("n", least=1)
    need = n if asked.get("need") is None else fields.whole("need", least=1)
    if need > n:
        raise InvalidRequest(f"{where}: need = {need} is more than n = {n}", param=f"{where}.need")
    return Group(
        n=n,
        need=need,
        model=fields.text("model") or None,
        prompt=_prompt(where, asked.get("prompt")),
        messages=_messages(where, asked.get("messages")),
        rendering={key: asked[key] for key in ("tools", "chat_template_kwargs") if asked.get(key) is not None},
        sampling=_sampling(where, shared.get("sampling"), given.get("sampling")),
        session_id=fields.text("session_id"),
        parent=_parent(where, asked.get("parent")),
        expected_tokens=None if asked.get("expected_tokens") is None else fields.whole("expected_tokens", least=1),
        **_terms(fields),
    )


def _resumption(where: str, given: Json, shared: Json) -> Resumption:
    if wrong := [key for key in given if key not in _OF_RESUMED and given[key] is not None]:
        raise InvalidRequest(
            f"{where}.{wrong[0]} is fixed by the group that goes on: beside resume, set {', '.join(_OF_RESUMED[1:])}",
            param=f"{where}.{wrong[0]}",
        )
    fields = _Fields(f"{where}.resume", given["resume"])
    own = _Fields(where, {key: value for key, value in {**shared, **given}.items() if key in _OF_RESUMED})
    need = None if own.given.get("need") is None else own.whole("need", least=1)
    terms = {key: value for key, value in _terms(own).items() if own.given.get(key) is not None or key == "deadline_s"}
    return Resumption(
        id=fields.text("id", required=True), group=fields.whole("group", least=0), need=need, changes=terms
    )


def _terms(fields: "_Fields") -> Json:
    """The fields that a group which goes on may change."""
    freshness = {key: fields.given.get(key) for key in ("min_version", "max_staleness")}
    return freshness | {
        "deadline_s": fields.seconds("deadline_s"),
        "on_deadline": fields.choice("on_deadline", OnDeadline) or OnDeadline.CANCEL,
        "priority": fields.whole("priority", least=-_MOST_PRIORITY) if fields.given.get("priority") is not None else 0,
    }


def _prompt(where: str, prompt: Any) -> str | list[int] | None:
    if isinstance(prompt, bytes):
        if len(prompt) % 4:
            raise InvalidRequest(f"{where}.prompt has {len(prompt)} bytes, no int32 values", param=f"{where}.prompt")
        prompt = np.frombuffer(prompt, "<i4").tolist()
    if prompt is None or isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
        return list(map(dict[int, int]().setdefault, prompt, prompt))  # JSON gives an object for each token
    raise InvalidRequest(f"{where}.prompt is {_kind(prompt)}: send text or token ids", param=f"{where}.prompt")


def _messages(where: str, messages: Any) -> list[Json] | None:
    if messages is None:
        return None
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise InvalidRequest(f"{where}.messages must be a list of at least one message", param=f"{where}.messages")
    return messages


def _sampling(where: str, shared: Any, own: Any) -> Json:
    parts = [part for part in (shared, own) if part is not None]
    for part in parts:
        if not isinstance(part, dict):
            raise InvalidRequest(f"{where}.sampling is {_kind(part)}: send an object", param=f"{where}.sampling")
        if wrong := [key for key in part if key in _NOT_SAMPLING]:
            raise InvalidRequest(
                f"{where}.sampling.{wrong[0]} is refused: it is a field of the group, or asks for what no stream has",
                param=f"{where}.sampling.{wrong[0]}",
            )
    sampling: Json = {key: value for part in parts for key, value in part.items()}
    logprobs = sampling.pop("logprobs", True)
    if type(logprobs) is not bool:
        raise InvalidRequest(
            f"{where}.sampling.logprobs = {logprobs!r:.80} must be true or false: true is those of the sampled tokens",
            param=f"{where}.sampling.logprobs",
        )
    return sampling | ({"logprobs": 0} if logprobs else {})


def _parent(where: str, parent: Any) -> SampleName | None:
    if parent is None:
        return None
    fields = _Fields(f"{where}.parent", parent)
    return SampleName(fields.text("id", required=True), fields.whole("group", least=0), fields.whole("sample", least=0))


class _Fields:
    """The fields of one object, each read with its error."""

    def __init__(self, where: str, given: Any) -> None:
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"{where} is {_kind(given)}: send an object", param=where)
        self._where = where
        self.given = given

    def whole(self, name: str, *, least: int) -> int:
        value = self.given.get(name)
        if type(value) is not int or not least <= value <= max(_MOST_PRIORITY, -least):
            raise self._wrong(name, f"must be a whole number of at least {least} and at most {_MOST_PRIORITY}")
        return value

    def seconds(self, name: str) -> float | None:
        value = self.given.get(name)
        if value is None:
            return None
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or not 0 < value <= _LONGEST_DEADLINE_S:
            raise self._wrong(name, f"must be a number of seconds above 0 and at most {_LONGEST_DEADLINE_S:g}")
        return float(value)

    def text(self, name: str, *, required: bool = False) -> str:
        value = self.given.get(name)
        if value is None and not required:
            return ""
        if not isinstance(value, str) or not value or len(value) > _LONGEST_TEXT:
            raise self._wrong(name, f"must be text of 1 to {_LONGEST_TEXT} characters")
        return value

    def choice(self, name: str, choices: type[OnDeadline]) -> OnDeadline | None:
        value = self.given.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in tuple(choices):
            raise self._wrong(name, f"must be one of {', '.join(choices)}")
        return choices(value)

    def _wrong(self, name: str, rule: str) -> InvalidRequest:
        path = f"{self._where}.{name}"
        return InvalidRequest(f"{path} = {self.given.get(name)!r:.80} {rule}", param=path)


def _refuse_unknown(given: Json, known: tuple[str, ...], where: str) -> None:
    for name in _unknown(given, known):
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise InvalidRequest(f"{where}{name} is unknown: {hint}", param=f"{where}{name}")


def _unknown(given: Json, known: tuple[str, ...]) -> Iterator[str]:
    return (str(name) for name in given if name not in known)


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else "missing" if value is None else f"a {type(value).__name__}"
