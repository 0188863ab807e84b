"""How long an engine takes for a batch of rollouts: a roofline whose few constants are fitted to measurements.

A decode step reads the weights or multiplies with them, whichever takes longer, and reads the KV cache. It takes no
less than what the CPU needs to launch it, which without a CUDA graph grows with the layers, and each sequence in it
costs the CPU some more. Prompts are multiplied with the weights once, for all samples of a group. Beside that an API
process parses requests and turns tokens into replies, and whichever of engine and API process is slower sets the pace.
"""

import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from tuning.plan.gpu import Gpu
from tuning.plan.shape import ModelShape
from tuning.plan.workload import StepWorkload

# vLLM captures CUDA graphs up to this many sequences, where max_num_seqs is at least half as large.
LARGEST_GRAPH = 512
# Two costs that overlap take a little more than the longer of them; the larger the power, the less.
_OVERLAP = 8
# Two all-reduces a layer, of a usual latency between GPUs with NVLink; not fitted.
_ALL_REDUCE_S = 10e-6
_ALL_REDUCES = 2
# Distinct lengths of a batch: enough for the tail, few enough to be quick.
_DISTINCT_LENGTHS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The fitted constants, of vLLM. `scripts/fit_speeds.py` makes them."""

    bandwidth: float
    """Share of the memory bandwidth that decoding reaches."""
    compute: float
    """Share of the bfloat16 FLOP/s that matrix products reach."""
    step_s: float
    """CPU time to launch a step that has a CUDA graph: the least that one takes."""
    eager_layer_s: float
    """CPU time to launch each layer of a step that has none."""
    sequence_s: float
    """CPU time for each sequence of a step."""
    api_token_s: float
    """Time of an API process for each token it delivers."""
    api_request_s: float
    """Time of an API process for each prompt it takes."""


def fitted() -> Speeds:
    """The constants that were measured."""
    return Speeds(**json.loads(files("tuning.plan").joinpath("fitted.json").read_text(encoding="utf-8"))["speeds"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """One data parallel rank of a replica, which is all of it without data parallelism. `cpu_factor` is how much slower
    its CPU cores are than those the constants were measured with."""

    shape: ModelShape
    gpu: Gpu
    tensor_parallel: int
    data_parallel: int = 1
    """Ranks that share the routed experts, and have sequences of their own."""
    max_num_seqs: int
    kv_tokens: float
    """Tokens that its KV cache holds."""
    api_servers: float = 1
    graph_seqs: int = LARGEST_GRAPH
    """Sequences of the largest step that has a CUDA graph; 0 where none has."""
    cpu_factor: float = 1.0
    speeds: Speeds

    def step_s(self, sequences: float, kv_tokens: float) -> float:
        """Seconds of a decode step of so many sequences, which hold so many tokens together."""
        shape, share = self.shape, self.tensor_parallel
        bandwidth = self.gpu.tb_per_s * 1e12 * self.speeds.bandwidth
        weights = shape.read_bytes(sequences, share, self.data_parallel) / bandwidth
        product = 2 * shape.active_parameters * sequences / share / self._flops
        cache = kv_tokens * shape.kv_bytes(share, kv_tokens / sequences) / bandwidth
        on_gpu = overlapped(weights, product) + cache + self._all_reduce_s(sequences) + self._exchange_s(sequences)
        launch_s = self.speeds.step_s if sequences <= self.graph_seqs else self.speeds.eager_layer_s * shape.layers
        launched = overlapped(on_gpu, launch_s * self.cpu_factor)
        return launched + self.speeds.sequence_s * self.cpu_factor * sequences

    def prefill_s(self, prompt_tokens: float) -> float:
        """Seconds to read one prompt."""
        attention = 2 * self.shape.attention_width * prompt_tokens  # half of the tokens are before the average one
        work = prompt_tokens * (2 * self.shape.active_parameters + attention)
        return work / self.tensor_parallel / self._flops

    def api_s(self, prompts: float, tokens: float) -> float:
        """Seconds that an API process works for so many prompts and tokens of the engine."""
        speeds = self.speeds
        return (speeds.api_request_s * prompts + speeds.api_token_s * tokens) * self.cpu_factor / self.api_servers

    @property
    def _flops(self) -> float:
        return self.gpu.tflops * 1e12 * self.speeds.compute

    def _all_reduce_s(self, sequences: float) -> float:
        if self.tensor_parallel == 1:
            return 0.0
        moved = sequences * self.shape.hidden * 2 / (self.gpu.link_gb_per_s * 1e9)
        return _ALL_REDUCES * self.shape.layers * (_ALL_REDUCE_S + moved)

    def _exchange_s(self, sequences: float) -> float:
        """Seconds in which tokens go to the ranks of their experts and back."""
        experts = self.shape.experts
        if self.data_parallel == 1 or experts is None:
            return 0.0
        moved = sequences * min(experts.used, self.data_parallel) * self.shape.hidden * 2
        return _ALL_REDUCES * experts.layers * (_ALL_REDUCE_S + moved / (self.gpu.link_gb_per_s * 1e9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A batch on one replica. `seconds` is from the request to its last token."""

    seconds: float
    engine_s: float
    prefill_s: float
    api_s: float
    tokens: float
    completions: int
    most_running: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def rollout(engine: EngineModel, work: StepWorkload) -> Rollout:
    """The rollout of one replica, where all prompts of `work` arrive at once."""
    lengths = _mixed(work)
    prefill_s, decode_s, most = _run(engine, work, lengths)
    tokens = float(sum(lengths))
    api_s = engine.api_s(work.prompts, tokens)
    engine_s = prefill_s + decode_s
    return Rollout(
        seconds=overlapped(engine_s, api_s),
        engine_s=engine_s,
        prefill_s=prefill_s,
        api_s=api_s,
        tokens=tokens,
        completions=len(lengths),
        most_running=most,
    )


def overlapped(first: float, second: float) -> float:
    """Return the time of two overlapping costs: between the longer and their sum, near the longer."""
    return float((first**_OVERLAP + second**_OVERLAP) ** (1 / _OVERLAP))


def _mixed(work: StepWorkload) -> list[int]:
    """The completions' lengths in order of arrival; few distinct ones, so that many end in the same step."""
    grain = max(1.0, work.response.longest / _DISTINCT_LENGTHS) if work.response.mean < work.response.longest else 1.0
    lengths = [max(1, round(round(length / grain) * grain)) for length in work.response.quantiles(work.completions)]
    random.Random(0).shuffle(lengths)
    return lengths


def _run(engine: EngineModel, work: StepWorkload, lengths: Sequence[int]) -> tuple[float, float, int]:
    """Continuous batching from one ending to the next: seconds of prefill and of decoding, and the most that ran."""
    prompt = work.prompt.mean
    # Blocks are taken as sequences grow; what runs at a time is held to what fits at their mean length.
    room = max(1, int(engine.kv_tokens / (prompt + work.response.mean)))
    limit = min(engine.max_num_seqs, room)
    ends: list[int] = []
    step, started, held, prefill_s, decode_s, most = 0, 0, 0.0, 0.0, 0.0, 0
    while started < len(lengths) or ends:
        while started < len(lengths) and len(ends) < limit:
            heapq.heappush(ends, step + lengths[started])
            prefill_s += engine.prefill_s(prompt) if started % work.samples == 0 else 0.0
            held += prompt
            started += 1
        most = max(most, len(ends))
        steps = ends[0] - step
        decode_s += steps * engine.step_s(len(ends), held + len(ends) * steps / 2)
        held += len(ends) * steps
        step = ends[0]
        mean_held = held / len(ends)
        while ends and ends[0] == step:
            heapq.heappop(ends)
            held -= mean_held
    return prefill_s, decode_s, most
