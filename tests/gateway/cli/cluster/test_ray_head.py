"""The environment of a Ray that `up` starts."""

import pytest

from gateway.cli.cluster.ray_head import SERVE_ENVIRONMENT

constants = pytest.importorskip("ray.serve._private.constants")

pytestmark = pytest.mark.ray


def test_serve_knows_the_time_that_its_proxy_has_to_start() -> None:
    """Serve reads it at its import; tests/conftest.py has set it."""
    assert float(SERVE_ENVIRONMENT["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"]) == constants.PROXY_READY_CHECK_TIMEOUT_S
