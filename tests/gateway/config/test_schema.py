"""The rules of the schema itself."""

import pytest
from pydantic import ValidationError

from gateway.config.schema import Config


def test_an_address_off_loopback_needs_both_kinds_of_keys() -> None:
    with pytest.raises(ValidationError, match=r"gateway.admin_keys"):
        Config.model_validate({"gateway": {"host": "0.0.0.0", "inference_keys": ["a"]}})
    Config.model_validate({"gateway": {"host": "0.0.0.0", "inference_keys": ["a"], "admin_keys": ["b"]}})


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "env:", "file:"])
@pytest.mark.parametrize("section", ["inference_keys", "admin_keys"])
def test_a_key_that_every_client_sends_or_none_can_is_refused(section: str, key: str) -> None:
    with pytest.raises(ValidationError, match=rf"{section}\.1\n.*: give .*env:NAME or file:PATH") as found:
        Config.model_validate({"gateway": {section: ["good", key]}})
    assert "good" not in str(found.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"gateway": {"host": "0.0.0.0", "admin_keys": ["the-key"]}},
        {"gateway": {"admin_keys": "the-key"}},
        {"gateway": {"admin_key": "the-key"}},
        {"gateway": {"admin_keys": ["the-key x"]}},
        {"engine": {"kind": "external", "url": "http://user:the-key@host:8000"}},
        {"engine": {"kind": "sim", "url": "http://a", "env": {"HF_TOKEN": "the-key"}}},
    ],
)
def test_a_mistake_is_told_without_the_keys_beside_it(tree: dict[str, object]) -> None:
    """Serve keeps the error of a document where everybody reads it."""
    with pytest.raises(ValidationError) as found:
        Config.model_validate(tree)
    assert "the-key" not in str(found.value)


def test_a_secret_among_the_arguments_of_an_engine_is_refused() -> None:
    for name in ("hf_token", "hf-token", "api_key"):
        with pytest.raises(ValidationError, match=f"extra.{name}: all users of a machine see"):
            Config.model_validate({"engine": {"extra": {name: "the-secret"}}})
    Config.model_validate({"engine": {"extra": {"hf_token": True}}})  # the token of the hub's own file


def test_the_path_of_a_key_s_file_may_have_spaces() -> None:
    Config.model_validate({"gateway": {"admin_keys": ["file:/etc/my keys", "env:NAME", "a-key"]}})


@pytest.mark.parametrize("section", ["gateway", "fleet", "weights", "serve", "engine"])
def test_unknown_keys_are_refused_everywhere(section: str) -> None:
    with pytest.raises(ValidationError, match="extra"):
        Config.model_validate({section: {"surprise": 1}})


@pytest.mark.parametrize(
    ("section", "key"),
    [("gateway", "port"), ("gateway", "generate_timeout_s"), ("engine", "max_model_len"), ("serve", "http_port")],
)
def test_a_switch_is_no_number(section: str, key: str) -> None:
    for value in (True, False):
        with pytest.raises(ValidationError, match="a number is needed"):
            Config.model_validate({section: {key: value}})


def test_the_weight_store_is_an_absolute_path() -> None:
    assert Config.model_validate({"weights": {"store": "/mnt/weights"}}).weights.store == "/mnt/weights"
    assert Config.model_validate({"weights": {"store": None}}).weights.store is None
    with pytest.raises(ValidationError, match=r"weights\.store\n.*'weights' is no absolute path"):
        Config.model_validate({"weights": {"store": "weights"}})


def test_the_relay_needs_a_store() -> None:
    with pytest.raises(ValidationError, match=r"relay = 'always' needs a weight store"):
        Config.model_validate({"weights": {"relay": "always", "store": None}})
    with pytest.raises(ValidationError, match="relay_device"):
        Config.model_validate({"weights": {"relay_device": "7"}})


def test_a_control_plane_that_is_open_to_other_hosts_needs_keys() -> None:
    with pytest.raises(ValidationError, match=r"serve\.http_host = '0\.0\.0\.0' shows the fleet's status"):
        Config.model_validate({"serve": {"http_host": "0.0.0.0"}})
    Config.model_validate({"serve": {"http_host": "0.0.0.0", "proxy_location": "Disabled"}})
    keys = {"inference_keys": ["a"], "admin_keys": ["b"]}
    Config.model_validate({"serve": {"http_host": "0.0.0.0"}, "gateway": keys})
