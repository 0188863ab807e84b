"""How the bench clients are called; the calls themselves were run by hand, see docs/compatibility.md."""

import json
import sys
from pathlib import Path

from loadtests.studies.bench_clients import Load, clients, read_result, row

LOAD = Load(url="http://127.0.0.1:1", model="m", tokenizer="t", prompts=4, tokens_in=8, tokens_out=2)


def test_each_client_writes_a_result_of_its_own() -> None:
    pythons = {"vllm": sys.executable, "sglang": "other", "aiperf": "third", "guidellm": "fourth"}
    found = clients(LOAD, Path("/tmp/out"), pythons)
    assert len({client.result for client in found}) == len(found) == 9
    counts = {"aiperf": ("--request-count", "4"), "guidellm": ("--constraint", "kind=max_requests,count=4")}
    for client in found:
        folder = client.result.parent if client.program == "aiperf" else client.result
        assert any(word.endswith(str(folder)) for word in client.command)
        option, count = counts.get(client.program, ("--num-prompts", "4"))
        assert client.command[client.command.index(option) + 1] == count


def test_aiperfs_result_is_read_in_the_words_of_the_others(tmp_path: Path) -> None:
    client = clients(LOAD, tmp_path, {"aiperf": "third"})[-1]
    client.result.parent.mkdir()
    told = {"request_count": 4.0, "total_output_tokens": 8.0, "output_token_throughput": 12.6}
    client.result.write_text(
        json.dumps({name: {"avg": value} for name, value in told.items()} | {"time_to_first_token": {"p50": 3.4}})
    )
    assert row(client, read_result(client), 4) == (
        "| `aiperf --endpoint-type chat` | `/v1/chat/completions` | 4 of 4 | 8 | 13 | 3 |"
    )


def test_guidellms_result_is_read_in_the_words_of_the_others(tmp_path: Path) -> None:
    client = clients(LOAD, tmp_path, {"guidellm": "fourth"})[-1]
    told = {
        "request_totals": {"successful": 3, "errored": 1},
        "output_token_count": {"successful": {"total_sum": 6.0}},
        "output_tokens_per_second": {"successful": {"mean": 12.6}},
        "time_to_first_token_ms": {"successful": {"median": 3.4}},
    }
    client.result.write_text(json.dumps({"benchmarks": [{"metrics": told}]}))
    assert row(client, read_result(client), 4) == (
        "| `guidellm request_format=/v1/chat/completions` | `/v1/chat/completions` | 3 of 4 | 6 | 13 | 3 |"
    )
