"""The workload of a training step: prompts, samples, and their lengths."""

import math
from dataclasses import dataclass

from engines.errors import UsageError

_MOST_COMPLETIONS = 200_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: the mean, and the longest there can be."""

    mean: float
    longest: int

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """`600:4096` is a mean and the longest, `256` is both. Raises `UsageError` naming the option."""
        mean, colon, longest = text.partition(":")
        try:
            found = cls(float(mean), int(longest if colon else mean))
        except ValueError:
            raise UsageError(f"{option} {text!r}: expected MEAN:MAX tokens, such as 600:4096, or one number") from None
        if not 1 <= found.mean <= found.longest:
            raise UsageError(f"{option} {text!r}: the mean must be from 1 to the longest, {found.longest}")
        return found

    def quantiles(self, count: int) -> list[float]:
        """`count` lengths, shortest first: exponential and cut at the longest, as completions of a model that ends
        them by itself are; all equal where mean and longest are."""
        if self.mean >= 0.999 * self.longest:
            return [float(self.longest)] * count
        scale = self._scale()
        lengths = (-scale * math.log(1 - (index + 0.5) / count) for index in range(count))
        return [min(float(self.longest), max(1.0, length)) for length in lengths]

    @property
    def cut(self) -> float:
        """Share of the lengths that reach the longest."""
        return 1.0 if self.mean >= 0.999 * self.longest else math.exp(-self.longest / self._scale())

    def _scale(self) -> float:
        """The scale of the exponential whose mean, once cut, is `mean`."""
        low, high = self.mean, 1000.0 * self.longest
        for _ in range(80):
            scale = math.sqrt(low * high)
            mean = scale * (1 - math.exp(-self.longest / scale))
            low, high = (scale, high) if mean < self.mean else (low, scale)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """One step: `prompts` prompts with `samples` completions each."""

    prompts: int
    samples: int
    prompt: Lengths
    response: Lengths

    def __post_init__(self) -> None:
        for name, value in (("prompts", self.prompts), ("samples", self.samples)):
            if value < 1:
                raise UsageError(f"--{name} {value}: at least 1")
        if self.completions > _MOST_COMPLETIONS:
            raise UsageError(
                f"--prompts {self.prompts}, --samples {self.samples}: {self.completions} completions of a step, and at "
                f"most {_MOST_COMPLETIONS} are planned; plan a part of it"
            )

    @property
    def completions(self) -> int:
        return self.prompts * self.samples

    @property
    def new_tokens(self) -> float:
        return self.completions * self.response.mean

    @property
    def longest(self) -> int:
        """Prompt and completion together."""
        return self.prompt.longest + self.response.longest
