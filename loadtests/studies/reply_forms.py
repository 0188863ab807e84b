"""CPU time of a trainer for reading completions, by the form of the reply.

    python -m loadtests.studies.reply_forms --tokens 1024 --samples 512

Forms are whole replies of /v1/completions, one for each prompt with 8 samples, and events of /v1/rollouts in NDJSON and
in msgpack. All have the same tokens and log-probs and end as the same arrays.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import msgspec
import numpy as np
import orjson

from engines.engine import Json
from gateway.http.replies.record_stream import as_lines
from trainer_client.results import read_rollout
from trainer_client.submission import read_completion

_N = 8
_ROUNDS = 5
_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the CPU time of a trainer that reads completions.")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=512, help="samples, a multiple of 8")
    arguments = parser.parse_args()
    events = [_event(index, arguments.tokens) for index in range(arguments.samples)]
    packed = [msgspec.msgpack.encode(event) for event in events]
    lines = as_lines(packed).splitlines()
    replies = [orjson.dumps(_reply(events[start : start + _N])) for start in range(0, len(events), _N)]
    tokens = arguments.samples * arguments.tokens
    forms: dict[str, tuple[list[bytes], Callable[[bytes], object]]] = {
        "/v1/completions, JSON": (replies, _read_reply),
        "/v1/rollouts, NDJSON": (lines, _read_line),
        "/v1/rollouts, msgpack": (packed, _read_packed),
    }
    print("| form | CPU s per million tokens | MB per million tokens |\n| --- | --- | --- |")
    for name, (contents, read) in forms.items():
        size = sum(map(len, contents))
        print(f"| {name} | {_cpu_s(contents, read) / tokens * 1e6:.4f} | {size / tokens:.1f} |")


def _cpu_s(contents: list[bytes], read: Callable[[bytes], object]) -> float:
    """Return the median over rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for content in contents:
            read(content)
        rounds.append(time.process_time() - began)
    return median(rounds)


def _event(index: int, tokens: int) -> Json:
    draw = np.random.default_rng(index)
    return {
        "cursor": index + 1,
        "type": "sample",
        "group": index // _N,
        "sample": index % _N,
        "token_ids": draw.integers(0, 150_000, tokens, np.int32).tobytes(),
        "logprobs": (-draw.exponential(1.0, tokens)).astype(np.float32).tobytes(),
        "text": "word " * tokens,
        "finish_reason": "length",
        "weight_versions": [{"version": 3, "start": 0, "end": tokens}],
        "kv_versions": [3],
    }


def _reply(events: list[Json]) -> Json:
    """The same samples as vLLM writes them, each token with its name."""
    return {"choices": [_choice(index, event) for index, event in enumerate(events)]}


def _choice(index: int, event: Json) -> Json:
    token_ids = np.frombuffer(event["token_ids"], "<i4").tolist()
    logprobs = np.frombuffer(event["logprobs"], "<f4").astype(float).tolist()
    names = ["word "] * len(token_ids)
    best = [{"word ": logprob} for logprob in logprobs]
    offsets = list(range(0, 5 * len(token_ids), 5))
    scores = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": best, "text_offset": offsets}
    return event | {"index": index, "token_ids": token_ids, "logprobs": scores}


def _read_reply(content: bytes) -> object:
    return read_rollout(orjson.loads(content), "", 0, _N, attempts=1)


def _read_line(content: bytes) -> object:
    event = orjson.loads(content)
    arrays = {name: np.asarray(event[name], dtype).tobytes() for name, dtype in _ARRAYS.items()}
    return read_completion(event | arrays)


def _read_packed(content: bytes) -> object:
    return read_completion(msgspec.msgpack.decode(content))


if __name__ == "__main__":
    main()
