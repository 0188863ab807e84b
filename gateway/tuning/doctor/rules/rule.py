"""A rule: one row of a table, with a pure function that judges values."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gateway.tuning.doctor.engine_view import EngineView
from gateway.tuning.doctor.finding import Finding, Found, Severity
from gateway.tuning.doctor.subject import Subject
from gateway.tuning.doctor.values import Values

# Where figures and advice come from.
LEVERS = "docs/benchmarks.md, Levers of an engine (one H200 per engine, Qwen2-7B shape, vLLM 0.26)"
VERL_GUIDE = "verl, Performance Tuning Guide"
VERL_PRACTICE = "verl, Best Practices (docs/perf/best_practices.rst)"
VERL_CODE = "verl 0.9.1"
TRL_GUIDE = "TRL, Speeding Up Training"
TRL_CODE = "TRL 1.16.0"
VLLM_CODE = "vLLM 0.32"

Judged = tuple[str, Found]
"""The part that was read, and what was found there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`asks` is the question it answers, `reads` the keys, `why` what they do, `corrects` a wrong belief."""

    id: str
    asks: str
    reads: str
    why: str
    source: str
    check: Callable[[Subject], Iterable[Judged]]
    corrects: str = ""
    gain: float = 0.02
    """Share of a step that following it may save, roughly: 1 for a run that fails or learns nothing. It ranks."""
    is_general: bool = False
    """Its advice holds for nearly every file: it is named in one line, without its text."""

    def findings(self, subject: Subject) -> Iterator[Finding]:
        for where, found in self.check(subject):
            setting = found.setting
            yield Finding(
                rule=self.id,
                severity=found.severity,
                where=where,
                key=setting.key if setting else "",
                value=setting.value if setting else None,
                origin=setting.origin if setting else "",
                place=setting.place if setting else "",
                message=found.message,
                why=self.why,
                suggestion=found.suggestion,
                effect=found.effect,
                corrects=self.corrects if found.corrects else "",
                source=self.source,
                gain=self.gain,
                is_general=self.is_general and found.severity is Severity.CONSIDER,
            )


def of_engines(judge: Callable[[EngineView, Subject], Iterable[Found]]) -> Callable[[Subject], Iterator[Judged]]:
    """A check that asks `judge` of each engine."""

    def check(subject: Subject) -> Iterator[Judged]:
        for engine in subject.engines:
            yield from ((engine.where, found) for found in judge(engine, subject))

    return check


def of_verl(judge: Callable[[Values, Subject], Iterable[Found]]) -> Callable[[Subject], Iterator[Judged]]:
    """A check that asks `judge` of a verl configuration that trains."""

    def check(subject: Subject) -> Iterator[Judged]:
        if subject.verl and subject.verl.has_trainer:
            yield from (("verl", found) for found in judge(subject.verl.values, subject))

    return check


def of_verl_rollout(judge: Callable[[Values, Subject], Iterable[Found]]) -> Callable[[Subject], Iterator[Judged]]:
    """A check that asks `judge` of verl's rollout section, with a trainer or without."""

    def check(subject: Subject) -> Iterator[Judged]:
        if subject.verl and subject.verl.has_rollouts:
            yield from (("verl rollout", found) for found in judge(subject.verl.values, subject))

    return check


def of_trl(judge: Callable[[Values, Subject], Iterable[Found]]) -> Callable[[Subject], Iterator[Judged]]:
    """A check that asks `judge` of a TRL configuration."""

    def check(subject: Subject) -> Iterator[Judged]:
        if subject.trl and subject.trl.has_trainer:
            yield from (("TRL", found) for found in judge(subject.trl.values, subject))

    return check


def of_workload(judge: Callable[[Subject], Iterable[Found]]) -> Callable[[Subject], Iterator[Judged]]:
    """A check that asks `judge` of what the trainer will ask for."""

    def check(subject: Subject) -> Iterator[Judged]:
        if subject.workload.where:
            yield from ((subject.workload.where, found) for found in judge(subject))

    return check
