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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """A bench client in one dialect; `command` writes its result to `result`. Its Python has `module`."""

    program: str
    module: str
    dialect: str
    route: str
    command: list[str]
    result: Path

    @property
    def name(self) -> str:
        return f"{self.program} {self.dialect}"


def clients(load: Load, folder: Path, pythons: Mapping[str, str]) -> list[Client]:
    """Return the clients of the modules in `pythons`, each for a Python that has the module."""
    makers = {
        "vllm": _vllm_clients,
        "sglang": _sglang_clients,
        "aiperf": _aiperf_clients,
        "guidellm": _guidellm_clients,
    }
    return [client for module, python in pythons.items() for client in makers[module](load, folder, python)]


def _vllm_clients(load: Load, folder: Path, python: str) -> Iterator[Client]:
    for backend, route in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        result = folder / f"vllm-{backend}.json"
        own = {"backend": backend, "endpoint": route, "dataset-name": "random", "result-filename": result}
        command = [python, "-c", _VLLM_BENCH, *_flags(_common(load) | own), "--ignore-eos", "--save-result"]
        yield Client("vllm bench serve", "vllm", f"--backend {backend}", route, command, result)


def _sglang_clients(load: Load, folder: Path, python: str) -> Iterator[Client]:
    for backend, route in (
        ("sglang-oai", "/v1/completions"), ("sglang-oai-chat", "/v1/chat/completions"), ("sglang", "/generate"),
    ):  # fmt: skip
        result = folder / f"sglang-{backend}.jsonl"
        own = {"backend": backend, "dataset-name": "random-ids", "output-file": result}
        command = [python, "-m", "sglang.bench_serving", *_flags(_common(load) | own)]
        yield Client("sglang.bench_serving", "sglang", f"--backend {backend}", route, command, result)


def _aiperf_clients(load: Load, folder: Path, python: str) -> Iterator[Client]:
    for kind, route in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions")):
        out = folder / f"aiperf-{kind}"
        options = {
            "url": load.url, "model": load.model, "tokenizer": load.tokenizer, "endpoint-type": kind,
            "request-count": load.prompts, "concurrency": min(load.prompts, _STREAMS), "isl": load.tokens_in,
            "osl": load.tokens_out, "extra-inputs": "ignore_eos:true", "artifact-dir": out, "ui": "none",
        }  # fmt: skip
        command = [python, "-m", "aiperf", "profile", *_flags(options), "--streaming", "--use-server-token-count"]
        yield Client("aiperf", "aiperf", f"--endpoint-type {kind}", route, command, out / "profile_export_aiperf.json")


def _guidellm_clients(load: Load, folder: Path, python: str) -> Iterator[Client]:
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
        yield Client("guidellm", "guidellm", f"request_format={route}", route, command, result)


def _common(load: Load) -> dict[str, Any]:
    return {
        "base-url": load.url, "model": load.model, "tokenizer": load.tokenizer, "num-prompts": load.prompts,
        "random-input-len": load.tokens_in, "random-output-len": load.tokens_out,
    }  # fmt: skip


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
    # A module's distribution may have another name, as that of vLLM's CPU build.
    asked = "from importlib.metadata import packages_distributions, version; "
    asked += f"print(version(packages_distributions()[{client.module!r}][0]))"
    done = subprocess.run([client.command[0], "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    run = ClientRun(
        client=client.program,
        version=done.stdout.strip(),
        against=against,
        ran="its own load in each of its dialects, streamed",
    )
    outcome = "passed" if completed == load.prompts else "failed"
    write_record(folder, run, client.dialect, outcome, [f"{load.prompts} prompts each"])


def _run(client: Client, sglang_path: str) -> dict[str, Any]:
    """Run the client and return its result. Raise `RuntimeError` with the end of its output on failure."""
    # aiperf reads a tokenizer's folder only if the Hub is allowed; it does not ask the Hub for a path.
    env = os.environ | ({} if client.program == "aiperf" else {"HF_HUB_OFFLINE": "1"})
    if sglang_path and client.module == "sglang":
        env["PYTHONPATH"] = sglang_path
    done = subprocess.run(client.command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode or not client.result.exists():
        words = (done.stdout + done.stderr)[-_SHOWN_OF_A_FAILURE:]
        raise RuntimeError(f"{client.name} ended with {done.returncode}:\n{words}")
    return read_result(client)


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
    others = "a Python that has the module: vllm (this one unless given), sglang, aiperf or guidellm; repeat for more"
    parser.add_argument("--python", action="append", default=[], metavar="MODULE=PYTHON", help=others)
    parser.add_argument("--sglang-path", default="", help="PYTHONPATH of SGLang's client, on CPU tests/sglang_cpu")
    parser.add_argument("--record", type=Path, help="folder of the table of clients in docs/compatibility.md")
    parser.add_argument(
        "--against", default="4 simulated engines", help="description of the URL's engines for --record"
    )
    args = parser.parse_args(argv)
    load = Load(
        url=args.url, model=args.model, tokenizer=args.tokenizer, prompts=args.prompts, tokens_in=args.tokens_in,
        tokens_out=args.tokens_out,
    )  # fmt: skip
    pythons = {"vllm": sys.executable} | dict(one.split("=", 1) for one in args.python)
    failed = 0
    print("| client | route | answered | tokens | tokens/s | median TTFT, ms |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for client in clients(load, Path(folder), pythons):
            try:
                result = _run(client, args.sglang_path)
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
