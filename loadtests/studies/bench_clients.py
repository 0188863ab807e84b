"""The bench clients of vLLM and SGLang, aiperf and guidellm, run against a gateway in each of their dialects.

    python -m loadtests.shapes qwen2-0.5b /tmp/shape
    python -m loadtests.fleet -c examples/sim.yaml -- \
        python -m loadtests.studies.bench_clients {url} --tokenizer /tmp/shape

Prints a row per client; `--record docs/results/clients` keeps what docs/compatibility.md shows of them. Ends with 1
when a client failed, or got fewer answers than it sent prompts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from loadtests.studies.client_records import ClientRun, write_record

# vLLM's own command looks up the version of a distribution named vllm, which the CPU build is not.
_VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_TIMEOUT_S = 300.0
_STREAMS = 8
_SHOWN_OF_A_FAILURE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of each client."""

    url: str
    model: str
    tokenizer: str
    prompts: int
    tokens_in: int
    tokens_out: int


@dataclass(frozen=True, slots=True)
class Client:
    """A bench client in one dialect; `command` writes its result to `result`."""

    program: str
    distribution: str
    dialect: str
    route: str
    command: list[str]
    result: Path
    python_path: str = ""

    @property
    def name(self) -> str:
        return f"{self.program} {self.dialect}"

    @property
    def python(self) -> str:
        return self.command[0]


def clients(
    load: Load,
    folder: Path,
    vllm_python: str,
    sglang_python: str | None,
    sglang_python_path: str = "",
    aiperf_python: str | None = None,
    guidellm_python: str | None = None,
) -> list[Client]:
    """Return the clients. SGLang's, aiperf and guidellm need a Python that has them."""
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
        found.append(
            Client("vllm bench serve", _vllm_distribution(vllm_python), f"--backend {backend}", route, command, result)
        )
    if sglang_python is not None:
        found += _sglang_clients(common, folder, sglang_python, sglang_python_path)
    if aiperf_python is not None:
        found += _aiperf_clients(load, folder, aiperf_python)
    if guidellm_python is not None:
        found += _guidellm_clients(load, folder, guidellm_python)
    return found


def _sglang_clients(common: dict[str, Any], folder: Path, python: str, python_path: str) -> list[Client]:
    found = []
    for backend, route in (
        ("sglang-oai", "/v1/completions"), ("sglang-oai-chat", "/v1/chat/completions"), ("sglang", "/generate"),
    ):  # fmt: skip
        result = folder / f"sglang-{backend}.jsonl"
        own = {"backend": backend, "dataset-name": "random-ids", "output-file": result}
        command = [python, "-m", "sglang.bench_serving", *_flags(common | own)]
        found.append(
            Client("sglang.bench_serving", "sglang", f"--backend {backend}", route, command, result, python_path)
        )
    return found


def _aiperf_clients(load: Load, folder: Path, python: str) -> list[Client]:
    found = []
    for kind, route in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions")):
        out = folder / f"aiperf-{kind}"
        options = {
            "url": load.url, "model": load.model, "tokenizer": load.tokenizer, "endpoint-type": kind,
            "request-count": load.prompts, "concurrency": min(load.prompts, _STREAMS), "isl": load.tokens_in,
            "osl": load.tokens_out, "extra-inputs": "ignore_eos:true", "artifact-dir": out, "ui": "none",
        }  # fmt: skip
        command = [python, "-m", "aiperf", "profile", *_flags(options), "--streaming", "--use-server-token-count"]
        result = out / "profile_export_aiperf.json"
        found.append(Client("aiperf", "aiperf", f"--endpoint-type {kind}", route, command, result))
    return found


def _guidellm_clients(load: Load, folder: Path, python: str) -> list[Client]:
    found = []
    for route in ("/v1/completions", "/v1/chat/completions"):
        result = folder / f"guidellm{route.replace('/', '-')}.json"
        options = {
            "backend": f"kind=openai_http,target={load.url},model={load.model},request_format={route}",
            "profile": f"kind=concurrent,streams={min(load.prompts, _STREAMS)}",
            "constraint": f"kind=max_requests,count={load.prompts}",
            "tokenizer": f"kind=huggingface_auto,model={load.tokenizer}",
            "data": f"kind=synthetic_text,prompt_tokens={load.tokens_in},output_tokens={load.tokens_out}",
            "output": f"kind=json,path={result}",
        }
        command = [python, "-m", "guidellm", "run", *_flags(options), "--disable-console-interactive"]
        found.append(Client("guidellm", "guidellm", f"request_format={route}", route, command, result))
    return found


def row(client: Client, result: dict[str, Any], prompts: int) -> str:
    """Return a row of Markdown."""
    answered = f"{result['completed']} of {prompts}"
    return (
        f"| `{client.name}` | `{client.route}` | {answered} | {result['total_output_tokens']} | "
        f"{result['output_throughput']:.0f} | {result['median_ttft_ms']:.0f} |"
    )


def read_result(client: Client) -> dict[str, Any]:
    """Return a client's result with the keys of vLLM's and SGLang's: completed, total_output_tokens, ..."""
    text = client.result.read_text()
    readers: dict[str, Callable[[Any], dict[str, Any]]] = {"aiperf": _of_aiperf, "guidellm": _of_guidellm}
    if reader := readers.get(client.program):
        return reader(json.loads(text))
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def _of_aiperf(report: Any) -> dict[str, Any]:
    return {
        "completed": round(report["request_count"]["avg"]),
        "total_output_tokens": round(report["total_output_tokens"]["avg"]),
        "output_throughput": report["output_token_throughput"]["avg"],
        "median_ttft_ms": report["time_to_first_token"]["p50"],
    }


def _of_guidellm(report: Any) -> dict[str, Any]:
    metrics = report["benchmarks"][0]["metrics"]
    return {
        "completed": metrics["request_totals"]["successful"],
        "total_output_tokens": round(metrics["output_token_count"]["successful"]["total_sum"]),
        "output_throughput": metrics["output_tokens_per_second"]["successful"]["mean"],
        "median_ttft_ms": metrics["time_to_first_token_ms"]["successful"]["median"],
    }


def record(folder: Path, client: Client, load: Load, against: str, completed: int) -> None:
    """Keep what docs/compatibility.md shows of this run."""
    run = ClientRun(
        client=client.program,
        version=_ask(client.python, f"from importlib.metadata import version; print(version({client.distribution!r}))"),
        against=against,
        ran="its own load in each of its dialects, streamed",
    )
    outcome = "passed" if completed == load.prompts else "failed"
    write_record(folder, run, client.dialect, outcome, [f"{load.prompts} prompts each"])


def _run(client: Client) -> dict[str, Any]:
    """Run the client and return its result. Raise `RuntimeError` with the end of its output on failure."""
    # aiperf reads a tokenizer's folder only if the Hub is allowed; it does not ask the Hub for a path.
    env = os.environ | ({} if client.program == "aiperf" else {"HF_HUB_OFFLINE": "1"})
    if client.python_path:
        env["PYTHONPATH"] = client.python_path
    done = subprocess.run(client.command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode or not client.result.exists():
        words = (done.stdout + done.stderr)[-_SHOWN_OF_A_FAILURE:]
        raise RuntimeError(f"{client.name} ended with {done.returncode}:\n{words}")
    return read_result(client)


@cache
def _vllm_distribution(python: str) -> str:
    """Return the installed version; the CPU build has another distribution name."""
    asked = "from importlib.metadata import packages_distributions as found; print(*found().get('vllm', ()))"
    return (_ask(python, asked).split() or ["vllm"])[0]


def _ask(python: str, program: str) -> str:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def _flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.bench_clients", description=__doc__.splitlines()[0]
    )
    parser.add_argument("url", help="the gateway's URL")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer, such as from loadtests.shapes")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens-in", type=int, default=64)
    parser.add_argument("--tokens-out", type=int, default=32)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--sglang-python", help="Python of an environment with SGLang, such as .venv-sglang/bin/python")
    parser.add_argument("--sglang-python-path", default="", help="on CPU tests/sglang_cpu")
    parser.add_argument("--aiperf-python", help="Python of an environment with aiperf")
    parser.add_argument("--guidellm-python", help="Python of an environment with guidellm")
    parser.add_argument("--record", type=Path, help="folder of the table of clients in docs/compatibility.md")
    parser.add_argument(
        "--against", default="4 simulated engines", help="description of the URL's engines for --record"
    )
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
        for client in clients(
            load,
            Path(folder),
            args.vllm_python,
            args.sglang_python,
            args.sglang_python_path,
            args.aiperf_python,
            args.guidellm_python,
        ):
            try:
                result = _run(client)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(error, file=sys.stderr)
                continue
            failed += result["completed"] != load.prompts
            print(row(client, result, load.prompts), flush=True)
            if args.record:
                record(args.record, client, load, args.against, result["completed"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
