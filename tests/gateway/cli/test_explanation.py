"""The report of `config explain` on each engine group."""

from pathlib import Path

import pytest

from engines.process.interpreter import Interpreter
from gateway.cli.explanation import Explanation, Part, explain_engines
from gateway.config.load import HIDDEN, explain, load

FILE = """\
engine:
  kind: sim
  max_num_seqs: 9
  env: {A: b, HF_TOKEN: a-secret}
engines:
  policy:
    num_replicas: 2
    extra: {enable_prompt_tokens_details: true}
  judge:
    kind: external
    url: http://127.0.0.1:9
"""


@pytest.fixture
def groups(tmp_path: Path) -> dict[str, Explanation]:
    path = tmp_path / "fleet.yaml"
    path.write_text(FILE)
    environ = {"ROLLOUT_GATEWAY_ENGINES__POLICY__STREAM_INTERVAL": "4"}
    overrides = ["engines.policy.sim.mean_tokens=5"]
    found = explain_engines(load(path, overrides, environ), explain(path, overrides, environ))
    return {one.group: one for one in found}


def part(one: Explanation, text: str) -> Part:
    (found,) = (part for part in (*one.arguments, *one.environment) if part.text.startswith(text))
    return found


@pytest.mark.parametrize(
    ("text", "key", "origin"),
    [
        ("--max-num-seqs 9", "max_num_seqs", "file"),
        ("--stream-interval 4", "stream_interval", "env"),
        ("--sim ", "sim", "cli"),
        ("--world-size 1", "tensor_parallel_size", "default"),
        ("--enable-prompt-tokens-details", "extra.enable_prompt_tokens_details", "file"),
        ("--seed <engine.seed +", "seed", "default"),
        ("A=b", "env.A", "file"),
        (f"HF_TOKEN={HIDDEN}", "env.HF_TOKEN", "file"),
    ],
)
def test_every_word_tells_its_key_and_origin(groups: dict[str, Explanation], text: str, key: str, origin: str) -> None:
    found = part(groups["policy"], text)
    assert (found.key, found.origin) == (f"engines.policy.{key}", origin)


def test_what_no_key_gives_is_ours(groups: dict[str, Explanation]) -> None:
    found = part(groups["policy"], "--host 127.0.0.1")
    assert (found.key, found.origin) == ("", "rollout-gateway")


def test_what_a_group_takes_over_is_placed_where_it_was_given(groups: dict[str, Explanation]) -> None:
    assert part(groups["policy"], "--max-num-seqs").place.endswith("fleet.yaml:3")


def test_the_command_is_what_will_run_but_for_port_and_seed(groups: dict[str, Explanation]) -> None:
    words = groups["policy"].command
    assert words[1:3] == ("-m", "sim.server")
    assert words[words.index("--port") + 1] == "<free port>"
    assert words[words.index("--max-num-seqs") + 1] == "9"


def test_an_external_group_has_no_command(groups: dict[str, Explanation]) -> None:
    judge = groups["judge"]
    assert (judge.kind, judge.url, judge.command) == ("external", "http://127.0.0.1:9", ())


def test_a_python_of_its_own_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: {"sglang": "0.5.23"})
    overrides = ["engine.kind=sglang", "engine.model=some/model", "engine.python=/opt/python"]
    (one,) = explain_engines(load(None, overrides, {}), explain(None, overrides, {}))
    assert one.command[:3] == ("/opt/python", "-m", "sglang.launch_server")
    assert (part(one, "/opt/python").key, part(one, "/opt/python").origin) == ("engine.python", "cli")


def test_vllm_is_explained_with_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: {"vllm": "0.32.0"})
    overrides = ["engine.model=some/model", "engine.cudagraph_capture_sizes=[1,2]"]
    (one,) = explain_engines(load(None, overrides, {}), explain(None, overrides, {}))
    assert "some/model" in one.command
    assert part(one, "--cudagraph-capture-sizes 1 2").origin == "cli"
    assert part(one, "VLLM_SERVER_DEV_MODE=1").origin == "rollout-gateway"
