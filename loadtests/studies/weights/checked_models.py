"""Small random models of each kind, whose versions judge what an engine serves after an update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tiny_model.task import COMMITTED

KINDS = (
    "dense", "tied head", "square transposed", "experts", "dense, LoRA on", "experts, LoRA on", "dense, fp8",
    "experts, fp8",
)  # fmt: skip
PROMPTS, MADE_TOKENS = 32, 8
_PROMPT_TOKENS = 24
_NEAR, _NEAR_FP8 = 0.02, 0.25
"""Mean distances that an engine's own arithmetic may cause, in nats; a single token's may be 25 times as large."""
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
_KEPT = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size", "max_position_embeddings", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One version. Distances are means of absolute differences of log-probabilities, in nats."""

    version: int
    way: str
    distance: float
    farthest: float
    distance_before: float
    """From the weights of the version before: what an update that came to nothing would leave."""
    near: float
    """The mean distance that is the engine's own arithmetic."""

    @property
    def is_right(self) -> bool:
        is_near = self.distance < self.near and self.farthest < 25 * self.near
        return is_near and self.distance_before > 10 * self.distance


class Models:
    """The versions of one kind of model, each with random weights of its number."""

    def __init__(self, kind: str, folder: Path, device: str) -> None:
        self.kind = kind
        self._folder = folder
        self._device = device

    def version(self, number: int) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(number)
        return AutoModelForCausalLM.from_config(self._config(), dtype=torch.bfloat16).to(self._device).eval()

    def path(self, number: int) -> Path:
        """The version as a checkpoint with a tokenizer; made at the first call."""
        from transformers import AutoTokenizer

        folder = self._folder / f"v{number}"
        if not folder.exists():
            self.version(number).save_pretrained(folder)
            AutoTokenizer.from_pretrained(COMMITTED).save_pretrained(folder)
        return folder

    def sent(self, number: int) -> dict[str, Any]:
        """The tensors by the names of the checkpoint."""
        from safetensors.torch import load_file

        files = sorted(self.path(number).glob("*.safetensors"))
        return {name: one.to(self._device) for file in files for name, one in load_file(file).items()}

    def judged(
        self, version: int, way: str, before: int, made: Sequence[list[int]], told: Sequence[list[float]]
    ) -> Checked:
        """Compare log-probabilities that an engine told of the prompts and of the tokens that it made with those by the
        weights of `version`, and of the one before."""
        whole = [[*ids, *more] for ids, more in zip(prompts(), made, strict=True)]
        right, wrong = (_differences(self.version(one), whole, told) for one in (version, before))
        return Checked(
            version=version, way=way, distance=sum(right) / len(right), farthest=max(right),
            distance_before=sum(wrong) / len(wrong), near=_NEAR_FP8 if "fp8" in self.kind else _NEAR,
        )  # fmt: skip

    def _config(self) -> Any:
        from transformers import AutoConfig, GPT2Config, Qwen3MoeConfig

        config = AutoConfig.from_pretrained(COMMITTED)
        more = {"tie_word_embeddings": self.kind == "tied head", "initializer_range": 0.08, "dtype": "bfloat16"}
        if self.kind == "square transposed":
            return GPT2Config(
                n_embd=config.hidden_size, n_layer=config.num_hidden_layers, n_head=2, vocab_size=config.vocab_size,
                n_positions=config.max_position_embeddings, **more | {"tie_word_embeddings": True},
            )  # fmt: skip
        if not self.kind.startswith("experts"):
            config.update(more)
            return config
        return Qwen3MoeConfig(**{name: getattr(config, name) for name in _KEPT}, **_EXPERTS, **more)


def prompts() -> list[list[int]]:
    return [[5 + (7 * row + 13 * place * (row + 1)) % 100 for place in range(_PROMPT_TOKENS)] for row in range(PROMPTS)]


def verdict(report: dict[str, Any]) -> str:
    """Return the words for the versions of one kind of model."""
    far = [max(one[key] for one in report["versions"]) for key in ("distance", "farthest")]
    nearest = min((one["distance_before"] for one in report["versions"]), default=math.nan)
    return (
        f"{'right' if report['is_right'] else 'WRONG'}; mean distance at most {far[0]:.4f}, of one token "
        f"{far[1]:.3f}, from the version before {nearest:.2f}"
    )


def _differences(model: Any, whole: Sequence[Sequence[int]], told: Sequence[Sequence[float]]) -> list[float]:
    """Return the distances of log-probabilities from those of `model`, in nats, token by token."""
    import torch

    ids = torch.tensor(whole, device=model.device)
    with torch.no_grad():
        said = model.float()(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].tolist()
    return [abs(x - y) for row, other in zip(said, told, strict=True) for x, y in zip(row, other, strict=True)]
