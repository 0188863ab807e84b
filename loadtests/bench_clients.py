"""The bench clients of vLLM and SGLang, run against a gateway in each of their dialects.

    python -m loadtests.shapes qwen2-0.5b /tmp/shape
    python -m loadtests.fleet -c examples/sim.yaml -- python -m loadtests.bench_clients {url} --tokenizer /tmp/shape

Prints a row per client. Ends with 1 when a client failed, or got fewer answers than it sent prompts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM's own command looks up the version of a distribution named vllm, which the CPU build is not.
_VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_TIMEOUT_S = 300.0
_SHOWN_OF_A_FAILURE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each client sends."""

    url: str
    model: str
    tokenizer: str
    prompts: int
    tokens_in: int
    tokens_out: int


@dataclass(frozen=True, slots=True)
class Client:
    """A bench client in one of its dialects; `command` writes its result to `result`."""

    name: str
    route: str
    command: list[str]
    result: Path
    python_path: str = ""


def clients(
    load: Load, folder: Path, vllm_python: str, sglang_python: str | None, sglang_python_path: str = ""
) -> list[Client]:
    """SGLang's are left out where there is no Python that has it."""
    common = {
        "base-url": load.url,
        "model": load.model,
        "tokenizer": load.tokenizer,
        "num-prompts": load.prompts,
        "random-input-len": load.tokens_in,
        "random-output-len": load.tokens_out,
    }
    found = []
    for backend, route in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        result = folder / f"vllm-{backend}.json"
        own = {"backend": backend, "endpoint": route, "dataset-name": "random", "result-filename": result}
        command = [vllm_python, "-c", _VLLM_BENCH, *_flags(common | own), "--ignore-eos", "--save-result"]
        found.append(Client(f"vllm bench serve --backend {backend}", route, command, result))
    if sglang_python is None:
        return found
    for backend, route in (
        ("sglang-oai", "/v1/completions"), ("sglang-oai-chat", "/v1/chat/completions"), ("sglang", "/generate"),
    ):  # fmt: skip
        result = folder / f"sglang-{backend}.jsonl"
        own = {"backend": backend, "dataset-name": "random-ids", "output-file": result}
        command = [sglang_python, "-m", "sglang.bench_serving", *_flags(common | own)]
        found.append(Client(f"sglang.bench_serving --backend {backend}", route, command, result, sglang_python_path))
    return found


def row(client: Client, result: dict[str, Any], prompts: int) -> str:
    """A line of the table in docs/benchmarks.md."""
    answered = f"{result['completed']} of {prompts}"
    return (
        f"| `{client.name}` | `{client.route}` | {answered} | {result['total_output_tokens']} | "
        f"{result['output_throughput']:.0f} | {result['median_ttft_ms']:.0f} |"
    )


def _run(client: Client) -> dict[str, Any]:
    """The client's own result. Raises `RuntimeError` with its last words where there is none."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    if client.python_path:
        env["PYTHONPATH"] = client.python_path
    done = subprocess.run(client.command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode or not client.result.exists():
        words = (done.stdout + done.stderr)[-_SHOWN_OF_A_FAILURE:]
        raise RuntimeError(f"{client.name} ended with {done.returncode}:\n{words}")
    found: dict[str, Any] = json.loads(client.result.read_text().splitlines()[-1])
    return found


def _flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench_clients", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the gateway")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer; loadtests.shapes writes one")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens-in", type=int, default=64)
    parser.add_argument("--tokens-out", type=int, default=32)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--sglang-python", help="such as .venv-sglang/bin/python")
    parser.add_argument("--sglang-python-path", default="", help="on CPU tests/sglang_cpu")
    args = parser.parse_args(argv)
    load = Load(
        url=args.url,
        model=args.model,
        tokenizer=args.tokenizer,
        prompts=args.prompts,
        tokens_in=args.tokens_in,
        tokens_out=args.tokens_out,
    )
    failed = 0
    print("| client | route | answered | tokens | tokens/s | median TTFT, ms |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for client in clients(load, Path(folder), args.vllm_python, args.sglang_python, args.sglang_python_path):
            try:
                result = _run(client)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(error, file=sys.stderr)
                continue
            failed += result["completed"] != load.prompts
            print(row(client, result, load.prompts), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
