"""How the bench clients are called; the calls themselves were run by hand, see docs/benchmarks.md."""

from pathlib import Path

from loadtests.bench_clients import Load, clients, row

LOAD = Load(url="http://127.0.0.1:1", model="m", tokenizer="t", prompts=4, tokens_in=8, tokens_out=2)


def test_each_client_writes_a_result_of_its_own() -> None:
    found = clients(LOAD, Path("/tmp/out"), "python", "other")
    assert len({client.result for client in found}) == len(found) == 5
    for client in found:
        assert str(client.result) in client.command
        assert client.command[client.command.index("--num-prompts") + 1] == "4"


def test_without_a_python_that_has_sglang_its_clients_are_left_out() -> None:
    assert [client.route for client in clients(LOAD, Path("/tmp/out"), "python", None)] == [
        "/v1/completions",
        "/v1/chat/completions",
    ]


def test_a_row_tells_what_was_answered() -> None:
    client = clients(LOAD, Path("/tmp/out"), "python", "other")[-1]
    result = {"completed": 3, "total_output_tokens": 6, "output_throughput": 12.4, "median_ttft_ms": 1.6}
    assert row(client, result, 4) == "| `sglang.bench_serving --backend sglang` | `/generate` | 3 of 4 | 6 | 12 | 2 |"
