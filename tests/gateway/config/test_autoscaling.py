"""The number of replicas by load, as Serve is told it."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from engines.config import EngineConfig
from gateway.config.autoscaling import replicas_wanted, sizing


def group(**levers: Any) -> EngineConfig:
    return EngineConfig.model_validate({"kind": "sim", "num_replicas": 2, **levers})


def test_without_a_maximum_the_number_stands() -> None:
    assert sizing(group()) == {"num_replicas": 2}


def test_with_a_maximum_serve_calls_our_rule() -> None:
    found = sizing(group(max_replicas=4, downscale_delay_s=9))["autoscaling_config"]
    assert (found["min_replicas"], found["max_replicas"], found["downscale_delay_s"]) == (2, 4, 9)
    module, _, name = found["policy"]["policy_function"].partition(":")
    assert (module, name) == (replicas_wanted.__module__, "replicas_wanted")


@pytest.mark.parametrize(
    ("told", "wanted"), [({"wanted": {"a": 2.6, "b": 2.4}}, 2.6), ({"wanted": {"a": 0.0}}, 0.0), ({}, 3), (None, 3)]
)
def test_the_largest_word_of_a_replica_counts_and_without_one_nothing_changes(told: Any, wanted: float) -> None:
    assert replicas_wanted(SimpleNamespace(aggregated_metrics=told, target_num_replicas=3)) == (wanted, {})


def test_a_maximum_below_the_least_or_of_one_url_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_replicas = 1 is less than num_replicas = 2"):
        group(max_replicas=1)
    with pytest.raises(ValidationError, match="one URL is one replica"):
        group(kind="external", url="http://127.0.0.1:1", num_replicas=1, max_replicas=2)
