"""Arguments are checked against the installed engine; a wrong name is reported with its nearest neighbour."""

import os
import sys
from pathlib import Path

import pytest

from engines.errors import ConfigError
from engines.levers import LEVERS
from engines.process.arguments import ASK_SGLANG, ASK_VLLM, check_extra, installed_arguments
from engines.process.interpreter import Interpreter, interpreter_of
from engines.process.launch import engine_command
from tests.rigs.engines import real_sglang

KNOWN = frozenset({"max-loras", "no-enable-lora", "compilation-config"})
SCRIPT = 'print("loading"); print(\'["-h", "--help", "--max-loras"]\')'


@pytest.fixture
def ours(tmp_path: Path) -> Interpreter:
    return Interpreter(sys.executable, {"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.parametrize("name", ["max_loras", "max-loras", "no_enable_lora", "compilation_config.mode"])
def test_an_argument_of_the_engine_passes(name: str) -> None:
    check_extra([name], "vLLM 1.2", KNOWN)


def test_a_wrong_name_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra\.max_lora: vLLM 1\.2 .* did you mean max_loras\?"):
        check_extra(["max_lora"], "vLLM 1.2", KNOWN)


def test_without_the_engines_word_nothing_is_refused() -> None:
    check_extra(["zzz"], "vLLM 1.2", None)


def test_the_answer_is_kept_per_version(ours: Interpreter) -> None:
    assert installed_arguments("vllm-1.2", SCRIPT, ours) == frozenset({"help", "max-loras"})
    assert installed_arguments("vllm-1.2", "raise SystemExit(1)", ours) == frozenset({"help", "max-loras"})
    assert installed_arguments("vllm-1.3", "raise SystemExit(1)", ours) is None


@pytest.mark.parametrize("script", ["", "print('not JSON')", "print(1)", "import no_such_engine"])
def test_an_engine_that_does_not_tell_is_unknown(ours: Interpreter, script: str) -> None:
    assert installed_arguments("vllm-1.2", script, ours) is None


@pytest.mark.vllm
def test_the_installed_vllm_tells_its_arguments(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    ours = Interpreter(sys.executable, {**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    known = installed_arguments("vllm", ASK_VLLM, ours)
    assert known is not None
    assert {"max-num-seqs", "no-enable-lora", "compilation-config"} <= known


@pytest.mark.sglang
def test_the_installed_sglang_takes_every_argument_that_we_call_it_with(tmp_path: Path) -> None:
    config = real_sglang.engine_config(tmp_path, tmp_path, env=real_sglang.ENV | {"XDG_CACHE_HOME": str(tmp_path)})
    interpreter = interpreter_of(config)
    version = interpreter.versions("sglang")["sglang"]
    known = installed_arguments(f"sglang-{version}", ASK_SGLANG, interpreter)
    assert known is not None
    ours = {lever.sglang.replace("_", "-") for lever in LEVERS if lever.sglang}
    argv = engine_command(config, port=1, index=0).argv
    ours |= {word.removeprefix("--") for word in argv if word.startswith("--")}
    assert ours <= known
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\..* has no such argument; did you mean max_total_tokens\?"):
        engine_command(config.model_copy(update={"extra": {"max_totl_tokens": 1}}), port=1, index=0)
