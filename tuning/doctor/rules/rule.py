"""A rule: its texts, and the pure function that judges values. A rule about one key is a row of a table."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Generic, TypeVar

from tuning.doctor.engine_view import EngineView
from tuning.doctor.finding import Finding, Found, Severity
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


@dataclass(frozen=True, slots=True)
class Rule(Generic[V]):
    """A question about each value of a subject.

    `of` has the values, each with the part that it was read from; `reads` are the keys, `why` what they do, `corrects`
    a wrong belief. `gain` is the share of a step that following it may save, roughly: 1 for a run that fails or learns
    nothing; it ranks. Advice that `is_general` holds for nearly every file: it is named in one line.
    """

    of: Callable[[Subject], Iterable[tuple[str, V]]]
    id: str
    reads: str
    why: str
    source: str
    gain: float = 0.02
    corrects: str = ""
    is_general: bool = False
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
            is_general=self.is_general and found.severity is Severity.CONSIDER,
        )


def row(rule: Rule[Values], keys: str | Iterable[str], wrong: object, judge: Callable[..., Found], *says: str) -> Any:
    """Return the rule with a judgement of each key: `judge` with the texts `says` where its value is `wrong`, or where
    that is a function of values and key, where it is true. In the texts {} stands for the value."""

    def judged(values: Values, subject: Subject) -> Iterator[Found]:
        for key in [keys] if isinstance(keys, str) else keys:
            setting = values.at(key)
            if wrong(values, key) if callable(wrong) else setting.value is wrong:
                message, *rest = says
                yield judge(setting, message.replace("{}", f"{setting.value}"), *rest)

    return rule(judged)


def rules_of(module: ModuleType) -> tuple[Rule[Any], ...]:
    """Return the rules of a module, those of its table last: the order of findings and docs."""
    single = (found for found in vars(module).values() if isinstance(found, Rule))
    return (*single, *getattr(module, "TABLE", ()))


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


def _by_fsdp(subject: Subject) -> Values | None:
    values = _trained(subject)
    return values if values and is_fsdp(values) else None


of_verl_file = _part("verl", lambda subject: subject.verl)
of_verl = _part("verl", _trained)
# A fork's trainer, or one of which not all is read, makes other checks.
of_stock_verl = _part("verl", lambda subject: _trained(subject, by_stock=True))
of_fsdp = _part("verl", _by_fsdp)
of_rollout = _part("verl rollout", lambda subject: subject.verl.values if subject.verl else None)
of_trl_file = _part("TRL", lambda subject: subject.trl)
of_trl = _part("TRL", lambda subject: subject.trl.values if subject.trl and subject.trl.has_trainer else None)
of_live = _part("running", lambda subject: subject.live)
