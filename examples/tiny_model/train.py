"""Makes the tiny model of the demo and the tests: a Qwen3 with a million parameters that sorts digits.

The training ends on purpose with answers that are often wrong by one digit: the right answer is then the most likely
one but rarely sampled, which leaves room for reinforcement learning.

    python -m examples.tiny_model.train --out DIR     # make the model
    python -m examples.tiny_model.train --check       # make it again and compare with the committed one
"""

import argparse
import random
import re
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_model import task

SEED = 0
STEPS = 170
NOISY_FROM_STEP = 120
NOISE = 0.6
"""Share of answers with one wrong digit, from NOISY_FROM_STEP on."""
BATCH = 64
LEARNING_RATE = 2e-3
TOLERANCE = 1e-3
"""Largest difference of a weight between two machines that counts as the same model."""

PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=#,.:;?!()[]\n<>|_'\"%&"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Lets TRL's AsyncGRPOTrainer parse a reply; it knows only the templates of well-known models.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {"content": {"close_pattern": re.escape(END), "content": "text"}},
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, so that texts stay readable."""
    vocabulary = {token: i for i, token in enumerate([PAD, END, USER, ASSISTANT, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a new model. Its head is untied, since the demo pushes every tensor by its own name."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def with_one_wrong_digit(rng: random.Random, answer: str) -> str:
    at = rng.randrange(len(answer))
    wrong = rng.choice([digit for digit in "0123456789" if digit != answer[at]])
    return answer[:at] + wrong + answer[at + 1 :]


def training_batch(
    rng: random.Random, asked: list[str], tokenizer: PreTrainedTokenizerFast, noise: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, both (batch, longest); labels are -100 on prompts and padding."""
    rows, labels = [], []
    for problem in asked:
        right = task.answer(problem)
        said = with_one_wrong_digit(rng, right) if rng.random() < noise else right
        start = tokenizer.convert_tokens_to_ids([USER, *problem, ASSISTANT])
        reply = tokenizer.convert_tokens_to_ids([*said, END])
        rows.append(torch.tensor(start + reply))
        labels.append(torch.tensor([-100] * len(start) + reply))
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return ids, pad_sequence(labels, batch_first=True, padding_value=-100)


def share_of_learning_rate(step: int) -> float:
    """Return the learning-rate factor: up in 20 steps, then linearly down to a tenth."""
    return min(1.0, (step + 1) / 20) * max(0.1, 1 - step / STEPS)


def train(out: Path) -> None:
    """Train from SEED and write the model folder. One thread, so that sums are added in one order everywhere."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_learning_rate)
    asked = task.problems(SEED)
    for step in range(STEPS):
        noise = NOISE if step >= NOISY_FROM_STEP else 0.0
        ids, labels = training_batch(rng, list(islice(asked, BATCH)), tokenizer, noise)
        # Padding is on the right, so causal attention keeps it from every token that is trained on.
        logits = model(input_ids=ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}/{STEPS} loss {loss.item():.4f}", file=sys.stderr, flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference of any weight; raise ValueError for different tensors."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    if {name: t.shape for name, t in a.items()} != {name: t.shape for name, t in b.items()}:
        raise ValueError(f"{one} and {other} hold different tensors")
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the digit-sorting model, or check the committed one.")
    parser.add_argument("--out", type=Path, default=task.COMMITTED, help="folder to write")
    parser.add_argument("--check", action="store_true", help="make it in a temporary folder and compare")
    args = parser.parse_args()
    if not args.check:
        train(args.out)
        return
    with tempfile.TemporaryDirectory() as made:
        train(Path(made))
        difference = largest_difference(Path(made), task.COMMITTED)
    print(f"largest difference of a weight: {difference:.2e} (tolerance {TOLERANCE:.0e})")
    sys.exit(difference > TOLERANCE)


if __name__ == "__main__":
    main()
