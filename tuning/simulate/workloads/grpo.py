"""A trainer's batches: groups of samples, whose lengths depend on their prompt."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tuning.simulate.workloads.lengths import LogNormal
from tuning.simulate.workloads.workload import Ask, Stream

# Share of the variance of log lengths that is between prompts; the rest is between samples of one prompt.
_OF_PROMPTS = 0.6


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """`batches` of `prompts` prompts are an epoch, and each epoch has the same prompts in another order."""

    prompts: int
    samples: int
    batches: int
    epochs: int
    prompt: LogNormal
    response: LogNormal

    def stream(self, seed: int) -> Stream:
        draw = Random(f"grpo {seed}")
        known = [(self.prompt.drawn(draw), draw.gauss()) for _ in range(self.prompts * self.batches)]
        return [list(phase) for phase in self._phases(known, draw)]

    def _phases(self, known: list[tuple[int, float]], draw: Random) -> Iterator[Iterator[list[Ask]]]:
        order = list(range(len(known)))
        for epoch in range(self.epochs):
            draw.shuffle(order)
            for batch in range(self.batches):
                texts = order[batch * self.prompts : (batch + 1) * self.prompts]
                request = f"grpo-{epoch}-{batch}"
                yield ([self._group(request, text, *known[text], draw)] for text in texts)

    def _group(self, request: str, text: int, prompt: int, hardness: float, draw: Random) -> Ask:
        """A batch's weights are new, so its prompts share no KV with those of the batch before."""
        own, between = math.sqrt(1 - _OF_PROMPTS), math.sqrt(_OF_PROMPTS) * hardness
        lengths = tuple(self.response.at(between + own * draw.gauss()) for _ in range(self.samples))
        return Ask(
            request=request, text=text + 1, prefix=(request, text), prompt=prompt, lengths=lengths,
            limit=self.response.longest,
        )  # fmt: skip
