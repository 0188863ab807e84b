"""A rule: its texts, and the pure function that judges values."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Generic, TypeVar

from tuning.doctor.engine_view import EngineView
from tuning.doctor.finding import Finding, Found
from tuning.doctor.subject import Subject
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


@dataclass(frozen=True, slots=True)
class Rule(Generic[V]):
    """A question about each value of a subject.

    `of` has the values, each with the part that it was read from; `reads` are the keys, `why` what they do, `corrects`
    a wrong belief. `gain` is the share of a step that following it may save, roughly: 1 for a run that fails or learns
    nothing; it ranks.
    """

    of: Callable[[Subject], Iterable[tuple[str, V]]]
    id: str
    reads: str
    why: str
    source: str
    gain: float = 0.02
    corrects: str = ""
    judge: Judge[V] = lambda value, subject: ()

    def __call__(self, judge: Judge[V]) -> "Rule[V]":
        """Decorate the function that judges."""
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
        )


def rules_of(module: ModuleType) -> tuple[Rule[Any], ...]:
    """Return the rules of a module, in the order of findings and docs."""
    return tuple(found for found in vars(module).values() if isinstance(found, Rule))


def of_engines(subject: Subject) -> Iterator[tuple[str, EngineView]]:
    yield from ((engine.where, engine) for engine in subject.engines)


def of_workload(subject: Subject) -> Iterator[tuple[str, Workload]]:
    if subject.workload.where:
        yield subject.workload.where, subject.workload


def _part(where: str, value_of: Callable[[Subject], V | None]) -> Callable[[Subject], Iterable[tuple[str, V]]]:
    def found(subject: Subject) -> Iterator[tuple[str, V]]:
        if (value := value_of(subject)) is not None:
            yield where, value

    return found


def _trained(subject: Subject, *, by_stock: bool = False) -> Values | None:
    file = subject.verl
    return file.values if file and file.has_trainer and (file.is_stock or not by_stock) else None


of_verl_file = _part("verl", lambda subject: subject.verl)
of_verl = _part("verl", _trained)
# A fork's trainer, or one of which not all is read, makes other checks.
of_stock_verl = _part("verl", lambda subject: _trained(subject, by_stock=True))
of_rollout = _part("verl rollout", lambda subject: subject.verl.values if subject.verl else None)
of_trl_file = _part("TRL", lambda subject: subject.trl)
of_trl = _part("TRL", lambda subject: subject.trl.values if subject.trl and subject.trl.has_trainer else None)
of_live = _part("running", lambda subject: subject.live)
