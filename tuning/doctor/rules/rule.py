"""A rule: its texts, and the pure function under them that judges values."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Generic, TypeVar

from engines.config import EngineConfig
from tuning.doctor.engine_view import EngineView
from tuning.doctor.files.trl import TrlFile
from tuning.doctor.files.verl import VerlFile
from tuning.doctor.finding import Finding, Found, Severity
from tuning.doctor.live import Live
from tuning.doctor.subject import Subject
from tuning.doctor.trainer_memory import is_fsdp
from tuning.doctor.values import Values
from tuning.doctor.workload import Workload

# Where figures and advice come from.
LEVERS = "docs/benchmarks.md, Levers of an engine (one H200 per engine, Qwen2-7B shape, vLLM 0.26)"
VERL_GUIDE = "verl, Performance Tuning Guide"
VERL_PRACTICE = "verl, Best Practices (docs/perf/best_practices.rst)"
VERL_CODE = "verl 0.9.1"
TRL_GUIDE = "TRL, Speeding Up Training"
TRL_CODE = "TRL 1.16.0"
VLLM_CODE = "vLLM 0.32"

V = TypeVar("V")
Judge = Callable[[V, Subject], Iterable[Found]]


def _silent(value: object, subject: Subject) -> Iterable[Found]:
    return ()


@dataclass(frozen=True, slots=True)
class Rule(Generic[V]):
    """A question about each value of a subject. It decorates the pure function that answers it.

    `of` has the values, each with the part that it was read from; `asks` is the question, `reads` the keys, `why` what
    they do, `corrects` a wrong belief.
    """

    of: Callable[[Subject], Iterable[tuple[str, V]]]
    _: KW_ONLY
    id: str
    asks: str
    reads: str
    why: str
    source: str
    corrects: str = ""
    gain: float = 0.02
    """Share of a step that following it may save, roughly: 1 for a run that fails or learns nothing. It ranks."""
    is_general: bool = False
    """Its advice holds for nearly every file: it is named in one line, without its text."""
    judge: Judge[V] = _silent

    def __call__(self, judge: Judge[V]) -> "Rule[V]":
        return replace(self, judge=judge)

    def findings(self, subject: Subject) -> Iterator[Finding]:
        for where, value in self.of(subject):
            for found in self.judge(value, subject):
                yield self._finding(where, found)

    def _finding(self, where: str, found: Found) -> Finding:
        setting = found.setting
        return Finding(
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


def rules_of(module: ModuleType) -> tuple[Rule[Any], ...]:
    """Return the rules of a module in its order, which is that of findings and docs."""
    return tuple(found for found in vars(module).values() if isinstance(found, Rule))


def _engines(subject: Subject) -> Iterator[tuple[str, EngineView]]:
    yield from ((engine.where, engine) for engine in subject.engines)


def _engine_groups(subject: Subject) -> Iterator[tuple[str, EngineConfig]]:
    yield from ((f"gateway {name}", group) for name, group in (subject.config.groups if subject.config else {}).items())


def _workload(subject: Subject) -> Iterator[tuple[str, Workload]]:
    if subject.workload.where:
        yield subject.workload.where, subject.workload


def _verl_file(subject: Subject) -> Iterator[tuple[str, VerlFile]]:
    if subject.verl:
        yield "verl", subject.verl


def _verl_trainer(subject: Subject) -> Iterator[tuple[str, Values]]:
    if subject.verl and subject.verl.has_trainer:
        yield "verl", subject.verl.values


def _stock_trainer(subject: Subject) -> Iterator[tuple[str, Values]]:
    """verl's own trainer: a fork's, or one whose defaults are not all read, makes other checks."""
    if subject.verl and subject.verl.is_stock:
        yield from _verl_trainer(subject)


def _fsdp_trainer(subject: Subject) -> Iterator[tuple[str, Values]]:
    yield from ((where, values) for where, values in _verl_trainer(subject) if is_fsdp(values))


def _verl_rollout(subject: Subject) -> Iterator[tuple[str, Values]]:
    """verl's rollout section, with a trainer or without."""
    if subject.verl and subject.verl.has_rollouts:
        yield "verl rollout", subject.verl.values


def _trl_file(subject: Subject) -> Iterator[tuple[str, TrlFile]]:
    if subject.trl:
        yield "TRL", subject.trl


def _trl_trainer(subject: Subject) -> Iterator[tuple[str, Values]]:
    if subject.trl and subject.trl.has_trainer:
        yield "TRL", subject.trl.values


def _gateway(subject: Subject) -> Iterator[tuple[str, Live]]:
    if subject.live:
        yield "running", subject.live


engine_rule = partial(Rule, _engines)
engine_group_rule = partial(Rule, _engine_groups)
workload_rule = partial(Rule, _workload)
verl_file_rule = partial(Rule, _verl_file)
verl_trainer_rule = partial(Rule, _verl_trainer)
stock_verl_rule = partial(Rule, _stock_trainer)
fsdp_rule = partial(Rule, _fsdp_trainer)
verl_rollout_rule = partial(Rule, _verl_rollout)
trl_file_rule = partial(Rule, _trl_file)
trl_trainer_rule = partial(Rule, _trl_trainer)
live_rule = partial(Rule, _gateway)
