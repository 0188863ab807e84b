"""A tiny model that answers by heart, with reasoning, text and two tool calls: what parsers of an engine take apart."""

from pathlib import Path

import torch
from tokenizers import AddedToken
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.tiny_model.train import END, make_tokenizer

STEPS = 160
LEARNING_RATE = 4e-3
SURE = 0.9
"""The least share that the model may give to a token of an answer: rounding does not change what it says."""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "{", "}")
_REASONING = (
    "<think>\nthe user wants two things: the weather of a town, and what 17 * 3 is. i have a tool for each of them, so "
    "i need not guess; i ask for both at once.\n</think>\n\n"
)
_TEXT = "i look both of them up < one moment >, please.\n"
ANSWERS = {
    "1": f"""{_REASONING}{_TEXT}<tool_call>
{{"name": "weather", "arguments": {{"town": "ulm", "days": [1, 2, 3]}}}}
</tool_call>
<tool_call>
{{"name": "compute", "arguments": {{"term": "17 * 3", "exact": 1}}}}
</tool_call>""",
    "2": f"""{_REASONING}{_TEXT}<tool_call>
<function=weather>
<parameter=town>
ulm
</parameter>
</function>
</tool_call>
<tool_call>
<function=compute>
<parameter=term>
17 * 3
</parameter>
</function>
</tool_call>""",
}
"""What it says to a message: tool calls as Hermes writes them, and as Qwen3-Coder does."""


def save(folder: Path) -> None:
    """Train it, which takes seconds, and write it to `folder` as a checkpoint with its tokenizer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other longer than they work
    try:
        _save(folder)
    finally:
        torch.set_num_threads(threads)


def _save(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    texts = [f"<|user|>{asked}<|assistant|>{said}{END}" for asked, said in ANSWERS.items()]
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    wanted = pad_sequence(rows, batch_first=True, padding_value=-100)[:, 1:]
    wanted[:, :2] = -100  # the prompt
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        scores = model(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(scores.flatten(0, 1), wanted.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    with torch.no_grad():
        shares = model(input_ids=ids).logits[:, :-1].softmax(-1)
    told = wanted >= 0
    least = shares[told].gather(-1, wanted[told].unsqueeze(-1)).min().item()
    assert least > SURE, f"gives a token of its answers only {least:.3f}: train it longer"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
