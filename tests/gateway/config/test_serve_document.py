"""The deploy document says the same as the configuration, and no key."""

from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.config.load import load, with_secrets
from gateway.config.schema import Config
from gateway.config.serve_document import serve_config

EXAMPLES = Path(__file__).parents[3] / "examples"
OF_TRAINERS = {"grpo_trl.yaml", "verl_agent.yaml"}
CONFIGURATIONS = sorted(path for path in EXAMPLES.glob("*.yaml") if path.name not in OF_TRAINERS)


def config_of(**tree: object) -> Config:
    return Config.model_validate(tree)


def test_defaults_need_no_args() -> None:
    document = serve_config(Config())
    assert document == {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {"name": "rollout-gateway", "route_prefix": "/", "import_path": "gateway.app:build", "args": {}}
        ],
    }


def test_args_build_the_same_configuration() -> None:
    config = config_of(
        name="mine",
        gateway={"port": 9, "trusted_networks": ["10.0.0.0/8"]},
        serve={"http_port": 8001},
        engine={"kind": "sim", "sim": {"start_s": 1.5}, "env": {"A": "b"}},
    )
    assert with_secrets(Config.model_validate(serve_config(config)["applications"][0]["args"]), {}) == config


def test_a_group_that_returns_to_a_default_keeps_it() -> None:
    config = config_of(engine={"kind": "sim", "dtype": "float32"}, engines={"a": {"dtype": "auto"}, "b": {}})
    built = with_secrets(Config.model_validate(serve_config(config)["applications"][0]["args"]), {})
    assert built.groups == config.groups


def test_a_group_of_defaults_alone_is_kept() -> None:
    assert serve_config(config_of(engines={"a": {}}))["applications"][0]["args"] == {"engines": {"a": {}}}


def test_a_document_names_keys_and_has_none() -> None:
    named = {"admin_keys": ["file:/run/keys"], "inference_keys": ["env:MINE"]}
    assert serve_config(config_of(gateway=named))["applications"][0]["args"]["gateway"] == named
    with pytest.raises(ConfigError, match=r"gateway\.admin_keys .* env:NAME or file:PATH"):
        serve_config(config_of(gateway={"admin_keys": ["hunter2"]}))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert serve_config(load(path, [], {}))


@pytest.mark.ray
@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_serve_accepts_the_document_of_every_example(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    monkeypatch.chdir(EXAMPLES.parent)
    ServeDeploySchema.model_validate(serve_config(load(path, [], {})))
