"""Every way a value can come in, which one wins, and how a mistake is told."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.config.load import HIDDEN, explain, key_variables, load, with_secrets
from gateway.config.schema import Config


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "fleet.yaml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def mistake(path: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, environ or {})
    return str(caught.value)


def test_command_line_wins_over_environment_over_file_over_default() -> None:
    path = write("gateway: {port: 1, replay_grace_s: 2, max_attempts: 5}\n")
    environ = {"ROLLOUT_GATEWAY_GATEWAY__PORT": "3", "ROLLOUT_GATEWAY_GATEWAY__REPLAY_GRACE_S": "4"}
    config = load(path, ["gateway.port=6"], environ)
    assert config.gateway.port == 6
    assert config.gateway.replay_grace_s == 4
    assert config.gateway.max_attempts == 5
    assert config.gateway.host == "127.0.0.1"


@pytest.mark.parametrize(
    "arguments",
    [["--engine.tensor_parallel_size", "2"], ["--engine.tensor_parallel_size=2"], ["engine.tensor_parallel_size=2"]],
)
def test_an_override_has_three_spellings(arguments: list[str]) -> None:
    assert load(None, arguments, {}).engine.tensor_parallel_size == 2


def test_an_override_may_be_negative() -> None:
    assert load(None, ["--engine.max_logprobs", "-1"], {}).engine.max_logprobs == -1


def test_text_stays_text_where_text_is_asked_for() -> None:
    config = load(None, ["--name=7", "engine.served_model_name=1e3", "gateway.admin_keys=1,2"], {})
    assert config.name == "7"
    assert config.engine.served_model_name == "1e3"
    assert [key.get_secret_value() for key in config.gateway.admin_keys] == ["1", "2"]


@pytest.mark.parametrize("text", ["a,b", '["a", "b"]', " a , b ,"])
def test_lists_in_the_environment_are_json_or_comma_separated(text: str) -> None:
    config = load(None, [], {"ROLLOUT_GATEWAY_GATEWAY__INFERENCE_KEYS": text})
    assert [key.get_secret_value() for key in config.gateway.inference_keys] == ["a", "b"]


def test_text_in_the_environment_is_text_whatever_it_is_in_yaml() -> None:
    environ = {"ROLLOUT_GATEWAY_GATEWAY__ADMIN_KEYS": "@a*,1", "ROLLOUT_GATEWAY_ENGINE__MODEL": ""}
    config = load(None, [], environ)
    assert [key.get_secret_value() for key in config.gateway.admin_keys] == ["@a*", "1"]
    assert config.engine.model == ""


def test_a_section_in_the_environment_is_json() -> None:
    config = load(None, [], {"ROLLOUT_GATEWAY_ENGINE__ENV": '{"OMP_NUM_THREADS": "1"}'})
    assert config.engine.env == {"OMP_NUM_THREADS": "1"}


def test_a_number_as_variable_of_an_engine_is_text() -> None:
    """`NCCL_P2P_DISABLE=1` is written without quotes everywhere else."""
    assert load(None, ["engine.env.NCCL_P2P_DISABLE=1"], {}).engine.env == {"NCCL_P2P_DISABLE": "1"}


def test_kubernetes_service_variables_are_let_pass() -> None:
    environ = {"ROLLOUT_GATEWAY_PORT": "tcp://10.0.0.1:8100", "ROLLOUT_GATEWAY_SERVICE_HOST": "10.0.0.1"}
    assert load(None, [], environ) == load(None, [], {})


def test_an_empty_section_is_its_defaults() -> None:
    assert load(write("gateway:\nengine:\n"), [], {}) == load(None, [], {})


def test_groups_start_from_engine() -> None:
    path = write("engine: {dtype: float32, kind: sim}\nengines: {a: {num_replicas: 3}, b: {dtype: auto}}\n")
    config = load(path, ["engines.a.seed=5"], {})
    assert (config.engines["a"].dtype, config.engines["a"].num_replicas, config.engines["a"].seed) == ("float32", 3, 5)
    assert config.engines["b"].dtype == "auto"
    assert (list(config.groups), list(load(None, [], {}).groups)) == (["a", "b"], ["engine"])


FILE_MISTAKES = {
    "a wrong key": ("gateway:\n  prot: 9\n", "fleet.yaml:2: gateway.prot: unknown key; did you mean gateway.port?"),
    "a key at the wrong level": (
        "tensor_parallel_size: 2\n",
        "fleet.yaml:1: tensor_parallel_size: unknown key; did you mean engine.tensor_parallel_size?",
    ),
    "a wrong value": (
        "gateway:\n  port: 99999\n",
        "fleet.yaml:2: gateway.port = 99999: input should be less than or equal to 65535",
    ),
    "a value that a group took over": (
        "engine:\n  seed: -1\nengines:\n  a:\n    num_replicas: 2\n  b: {}\n",
        "fleet.yaml:2: engine.seed = -1: input should be greater than or equal to 0",
    ),
    "a value of a group": ("engine:\n  seed: 1\nengines:\n  a:\n    seed: -1\n", "fleet.yaml:5: engines.a.seed = -1:"),
    "a key given twice": ("name: a\nname: b\n", "fleet.yaml:2: name: already given on line 1"),
    "an open bracket": ("gateway: [\n", "fleet.yaml:2: not YAML"),
    "a template": ("gateway:\n  host: {{ host }}\n", "fleet.yaml:2: not YAML: found unhashable key"),
    "a list": ("- a\n", "fleet.yaml:1: a mapping"),
    "a key that is no text": (
        "gateway:\n  admin_keys: [hunter2, 3]\n",
        f"fleet.yaml:2: gateway.admin_keys.1 = {HIDDEN}: input should be a valid string",
    ),
    "defaults that are text": ("engine: text\nengines: {a: {}}\n", "fleet.yaml:1: engine = "),
    "defaults that are a list": ("engine: [a]\nengines: {a: {}}\n", "fleet.yaml:1: engine = "),
    "a Python for an engine that runs none": (
        "engine: {kind: sim, python: /bin/python}\n",
        "fleet.yaml:1: engine: python = '/bin/python' is for vLLM and SGLang; remove it from kind: sim",
    ),
    "a folder that is not there": (
        "engine: {model: some/folder/model}\n",
        "fleet.yaml:1: engine.model = 'some/folder/model': no such folder under ",
    ),
    "a home that is not there": (
        "engine: {model: ~nobody-here/model}\n",
        "fleet.yaml:1: engine.model = '~nobody-here/model': no such folder under ",
    ),
    "a file that is not there": (
        "engine: {python: python3}\n",
        "fleet.yaml:1: engine.python = 'python3': no such file under ",
    ),
    "a Serve document": (
        "applications:\n- import_path: gateway.app:build\n",
        "fleet.yaml:1: applications: unknown key; the keys here are name, gateway, ",
    ),
}


@pytest.mark.parametrize(("text", "told"), FILE_MISTAKES.values(), ids=FILE_MISTAKES.keys())
def test_a_mistake_in_a_file_is_told_with_its_line(text: str, told: str) -> None:
    found = mistake(write(text))
    assert found.startswith(told), found


@pytest.mark.parametrize(
    ("path", "told"), [("fleet.ini", "the name must end in"), ("absent.yaml", "cannot be read: No such file")]
)
def test_a_file_that_cannot_be_read_says_why(path: str, told: str) -> None:
    assert mistake(Path(path)).startswith(f"{path}: {told}")


def test_a_file_that_is_no_text_is_refused_in_plain_words(tmp_path: Path) -> None:
    (file := tmp_path / "fleet.yaml").write_bytes(b"\xff\xfe")
    assert mistake(file) == f"{file}: cannot be read: it is no UTF-8 text"


USAGE = "expected --key value, --key=value or key=value"


@pytest.mark.parametrize(
    ("arguments", "environ", "told"),
    [
        (["--gateway.port", "x"], {}, "argument --gateway.port: gateway.port = 'x':"),
        (
            [],
            {"ROLLOUT_GATEWAY_GATEWAY__PORT": "x"},
            "environment variable ROLLOUT_GATEWAY_GATEWAY__PORT: gateway.port = 'x':",
        ),
        (
            [],
            {"ROLLOUT_GATEWAY_GATEWY__PORT": "1"},
            "environment variable ROLLOUT_GATEWAY_GATEWY__PORT: unknown section gatewy; did you mean gate",
        ),
        (
            ["gateway.submissions.max_bytes=5"],
            {},
            "argument gateway.submissions.max_bytes: gateway.submissions: unknown",
        ),
        (["--gateway.port"], {}, f"argument --gateway.port: {USAGE}"),
        (["gateway.port"], {}, f"argument gateway.port: {USAGE}"),
        (["--gateway.port", "--name=a"], {}, f"argument --gateway.port: {USAGE}"),
        (["=3"], {}, f"argument : {USAGE}"),
    ],
)
def test_the_argument_or_variable_at_fault_is_named(arguments: list[str], environ: dict[str, str], told: str) -> None:
    assert mistake(write("gateway:\n  port: 1\n"), arguments, environ).startswith(told)


def test_keys_are_not_shown() -> None:
    assert "hunter2" not in repr(explain(None, ["gateway.admin_keys=hunter2"], {}))


def test_all_mistakes_are_told_at_once() -> None:
    assert len(mistake(write("gateway:\n  prot: 1\n  max_attempts: 0\nnaem: x\n")).splitlines()) == 3


def test_tokens_of_engines_are_not_shown() -> None:
    settings = explain(None, ["engine.env.HF_TOKEN=hunter2", "engine.env.KEYBOARD=plain"], {})
    shown = {setting.key: setting.value for setting in settings}
    assert (shown["engine.env.HF_TOKEN"], shown["engine.env.KEYBOARD"]) == (HIDDEN, "plain")
    assert shown["engine.api_key"] is None
    assert "hunter2" not in mistake(None, ["engine.env.HF_TOKEN=[hunter2]"])


def test_a_url_with_a_password_is_refused_and_not_told() -> None:
    told = mistake(None, ["engine.kind=external", "engine.url=http://me:hunter2@127.0.0.1:8000"])
    assert "hunter2" not in told
    assert "url" in told


@pytest.mark.parametrize("name", ["gateway", "control", "a/b", "a*", "a b", "a#b", "-a"])
def test_a_group_has_a_name_that_serve_and_files_can_carry(name: str) -> None:
    told = mistake(write(f"engine: {{kind: sim}}\nengines:\n  '{name}': {{}}\n"))
    assert f"{name!r} cannot name a group" in told


def test_a_model_folder_becomes_absolute(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    assert load(None, ["engine.model=models/tiny"], {}).engine.model == str(folder)
    config_file = write("engine: {model: tiny}\n", "models/fleet.yaml")
    assert load(config_file, [], {}).engine.model == str(folder)


def test_a_model_id_is_left_alone() -> None:
    assert load(None, ["engine.model=Qwen/Qwen2-7B"], {}).engine.model == "Qwen/Qwen2-7B"


def test_a_python_becomes_absolute_and_stays_in_its_environment(tmp_path: Path) -> None:
    link = tmp_path / "env" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to("/bin/sh")
    assert load(None, ["engine.python=env/bin/python"], {}).engine.python == str(link)
    config_file = write("engines: {a: {python: bin/python}}\n", "env/fleet.yaml")
    assert load(config_file, [], {}).engines["a"].python == str(link)
    assert load(None, ["engine.python=/on/another/node"], {}).engine.python == "/on/another/node"


def test_a_home_in_the_path_of_a_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python").write_text("")
    assert load(None, ["engine.python=~/python"], {}).engine.python == str(tmp_path / "python")


def test_explain_says_who_gave_each_value() -> None:
    path = write("engine:\n  kind: sim\n  seed: 3\nengines: {a: {}}\n")
    found = {s.key: s for s in explain(path, ["gateway.port=9"], {"ROLLOUT_GATEWAY_NAME": "n"})}
    assert (found["gateway.port"].origin, found["gateway.port"].place) == ("cli", "argument gateway.port")
    assert (found["name"].origin, found["name"].place) == ("env", "environment variable ROLLOUT_GATEWAY_NAME")
    assert (found["engines.a.seed"].value, found["engines.a.seed"].place) == (3, "fleet.yaml:3")
    assert (found["gateway.host"].origin, found["gateway.host"].place) == ("default", "")


def test_variables_of_keys_are_read_where_the_gateway_is_built_and_files_by_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    gateway = {"inference_keys": [f"file:{tmp_path}/keys", "three"], "admin_keys": ["env:ADMIN"]}
    config = with_secrets(Config.model_validate({"gateway": gateway}), {"ADMIN": "four,five"})
    assert [key.get_secret_value() for key in config.gateway.inference_keys] == [f"file:{tmp_path}/keys", "three"]
    assert [key.get_secret_value() for key in config.gateway.admin_keys] == ["four", "five"]


@pytest.mark.parametrize("reference", ["env:ABSENT", "file:/absent"])
def test_a_key_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.admin_keys"):
        with_secrets(Config.model_validate({"gateway": {"admin_keys": [reference]}}), {})


def test_the_variables_that_hold_keys_are_known() -> None:
    gateway = {"admin_keys": ["env:ADMIN", "written-out"], "inference_keys": ["env:READER", "file:/keys"]}
    external = {"kind": "external", "url": "http://127.0.0.1:1", "api_key": "env:THEIRS"}
    config = Config.model_validate({"gateway": gateway, "engines": {"policy": {"kind": "sim"}, "judge": external}})
    assert key_variables(config) == ("ADMIN", "READER", "THEIRS")
