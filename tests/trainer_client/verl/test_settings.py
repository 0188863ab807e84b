"""The keys under trainer.v1.gateway, and what is said of wrong ones."""

import math
from typing import Any

import pytest

from engines.errors import ConfigError
from trainer_client.verl.settings import read_settings

URL = "http://127.0.0.1:8100"


def test_the_url_is_all_that_must_be_given() -> None:
    settings = read_settings({"url": URL})
    assert (settings.url, settings.transport, settings.num_warmup_batches) == (URL, "auto", 0)


def test_the_url_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_URL", URL)
    assert read_settings({}).url == URL


def test_without_a_url_both_places_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_URL", raising=False)
    with pytest.raises(ConfigError, match=r"\+trainer\.v1\.gateway\.url=.*ROLLOUT_URL"):
        read_settings({})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"urll": URL}, r"trainer\.v1\.gateway: .* unknown field `urll`, .*; settings are url, transport"),
        ({"transport": "rdma"}, r"`\$\.transport`, in .*'transport': 'rdma'"),
        ({"sync_timeout_s": 0}, r"Expected `float` > 0.* `\$\.sync_timeout_s`"),
        ({"rollout_timeout_s": math.inf}, r"`\$\.rollout_timeout_s`, in .*inf"),
        ({"max_in_flight": "many"}, r"Expected `int`, got `str` .*`\$\.max_in_flight`"),
        ({"num_warmup_batches": -1}, r">= 0.* `\$\.num_warmup_batches`"),
    ],
)
def test_a_wrong_key_is_named_with_the_remedy(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings({"url": URL, **section})
