"""Has TRL's RLOOTrainer log what GRPOTrainer logs by itself: how far its own probabilities of the completions are from
those that the engines drew them with. It asks the engines for log-probs, which RLOO does without; nothing else changes.
"""

from typing import Any

RATIO = "sampling/importance_sampling_ratio"


def install() -> None:
    """Every trainer logs `RATIO` with /min, /mean and /max over the completions of a batch from then on."""
    import torch
    from trl import RLOOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    generate, score = VLLMGeneration.generate, RLOOTrainer._generate_and_score_completions

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.logprobs = 0  # of the sampled token alone
        made = generate(self, *args, **kwargs)
        self.drawn_with = [sum(position[0] for position in sequence) for sequence in made[2]]
        return made

    def witnessed(self: Any, inputs: Any) -> Any:
        batch = score(self, inputs)
        ratios = torch.exp(batch["old_logps"] - torch.tensor(self.vllm_generation.drawn_with))
        for name, value in (("min", ratios.min()), ("mean", ratios.mean()), ("max", ratios.max())):
            self._metrics["train"][f"{RATIO}/{name}"].append(value.item())
        return batch

    VLLMGeneration.generate, RLOOTrainer._generate_and_score_completions = recorded, witnessed
