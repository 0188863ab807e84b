"""The simulated language model: tokens and log-probs are pure functions of context, draw and weights.

Without state or clock, so that a test can recompute the answer of any weight version.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

from engines.config import SimConfig
from engines.weight_label import WeightLabel, version_of

EOS_TOKEN = 2
FIRST_TOKEN = 3  # ids below are special: padding, begin, end
CHECKPOINT_VERSION = "default"  # vLLM's label of the checkpoint
GREEDY = 0  # the draw of temperature 0

_MASK = (1 << 64) - 1
_HALF = 1 << 32
_MAX_CODE_POINT = 0x10FFFF
_pack = Struct("<QQQ").pack


@dataclass(frozen=True, slots=True)
class SimModel:
    """An autoregressive model: a token depends on all ids before it, the weights, and the draw.

    `held` maps what a label says is held to the weights actually used, where they differ from those of its version.
    """

    vocab_size: int
    mean_tokens: int
    held: dict[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, config: SimConfig) -> "SimModel":
        return cls(config.vocab_size, config.mean_tokens)

    def complete(
        self,
        prompt: Sequence[int],
        *,
        versions: str | Sequence[str] = CHECKPOINT_VERSION,
        max_tokens: int = 16,
        draw: int = GREEDY,
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> list[int]:
        """Return the completion of `prompt`; `versions` is the weight version of all tokens, or one per token."""
        tokens: list[int] = []
        context = read(prompt)
        while len(tokens) < max_tokens and EOS_TOKEN not in tokens[-1:]:
            version = versions if isinstance(versions, str) else versions[len(tokens)]
            may_end = not ignore_eos and len(tokens) >= min_tokens
            tokens.append(self.next_token(context, draw, weights_key(version), may_end))
            context = read(tokens[-1:], context)
        return tokens

    def key(self, label: str, adapter: str = "") -> int:
        """Return the key of the weights used under a reported label, with the adapter of this digest."""
        held = self.weights(WeightLabel.read(label).held)
        return weights_key(f"{held} under {adapter}" if adapter else held)

    def weights(self, held: str) -> str:
        """Return the name of the weights that a label names: that of its version, as tests compute them."""
        return self.held.get(held, version_name(version_of(held)) if held else "overwritten")

    def next_token(self, context: int, draw: int, weights: int, may_end: bool = True) -> int:
        """Return one token. The chance of an end is the same everywhere, so lengths are geometric."""
        noise = _hash(context, draw, weights)
        if may_end and (noise >> 32) * self.mean_tokens < _HALF:
            return EOS_TOKEN
        return FIRST_TOKEN + (noise & (_HALF - 1)) % (self.vocab_size - FIRST_TOKEN)

    def logprob(self, context: int, token_id: int, weights: int) -> float:
        """Return the teacher-forced log-prob of one token; the greedy token has the highest."""
        share = _hash(context, ~token_id & _MASK, weights) / (_MASK + 1)
        if token_id == self.next_token(context, GREEDY, weights):
            return -0.01 - 0.68 * share
        return -0.70 - 11.0 * share

    def jitter(self, context: int, neighbours: int) -> float:
        """Return the effect of the batch's size on a log-prob, from -1 to 1; 0 for a prompt alone.

        It is a kernel's, as on real engines: the same for one neighbour, for two or three, and for all more.
        """
        kernel = min(neighbours.bit_length(), 3)
        return 2 * _hash(context, kernel, 0) / (_MASK + 1) - 1 if kernel else 0.0

    def rank(self, logprob: float) -> int:
        """Return the rank in the vocabulary of a token with this log-prob."""
        return 1 if logprob > -0.70 else 2 + int((-0.70 - logprob) / 11.0 * (self.vocab_size - 2))

    def likely(self, context: int, count: int, weights: int) -> dict[int, float]:
        """Return log-probs of `count` tokens, best first: the greedy token and a sample of the others."""
        best = self.next_token(context, GREEDY, weights)
        others = (FIRST_TOKEN + (best + i) % (self.vocab_size - FIRST_TOKEN) for i in range(self.vocab_size))
        chosen = list(dict.fromkeys([best, *_first(count, others)]))[:count]
        scored = {token_id: self.logprob(context, token_id, weights) for token_id in chosen}
        return dict(sorted(scored.items(), key=lambda item: -item[1]))


def version_name(version: int) -> str:
    """Return the name of a version's weights."""
    return str(version) if version else CHECKPOINT_VERSION


def read(token_ids: Iterable[int], context: int = 0) -> int:
    """Return the context after these ids: a rolling hash, so that any wrong id changes all later tokens."""
    for token_id in token_ids:
        context = (context * 0x5851F42D4C957F2D + token_id + 1) & _MASK
    return context


@lru_cache(maxsize=1024)
def weights_key(version: str) -> int:
    """Return the part of a weight version in every hash."""
    return _digest(f"weights {version}")


def seeded_draw(seed: int, sample: int = 0) -> int:
    """Return the draw of a sample with this seed: as in vLLM, the draw of sample 0 with `seed + sample`."""
    return _digest(f"seed {seed + sample}") or 1


def unseeded_draw(engine_seed: int, prompt_number: int, sample: int) -> int:
    """Return the draw of a request without seed. As in vLLM, engines with the same seed draw the same samples."""
    return _digest(f"engine {engine_seed} prompt {prompt_number} sample {sample}") or 1


def tokenize(text: str) -> list[int]:
    """Return one token per character."""
    return [FIRST_TOKEN + ord(character) for character in text]


def detokenize(token_ids: Iterable[int]) -> str:
    """Return the characters of these ids; special ids have none."""
    return "".join(_character(token_id - FIRST_TOKEN) for token_id in token_ids if token_id >= FIRST_TOKEN)


def is_token(token_id: int) -> bool:
    """Return True for special ids and any Unicode character."""
    return 0 <= token_id <= FIRST_TOKEN + _MAX_CODE_POINT


def _character(code_point: int) -> str:
    # Surrogates have no UTF-8 form, so JSON could not carry them.
    return "\N{REPLACEMENT CHARACTER}" if 0xD800 <= code_point < 0xE000 else chr(code_point)


def _first(count: int, ids: Iterable[int]) -> list[int]:
    return [token_id for _, token_id in zip(range(count), ids, strict=False)]


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _hash(context: int, draw: int, weights: int) -> int:
    return int.from_bytes(blake2b(_pack(context, draw, weights), digest_size=8).digest(), "little")
