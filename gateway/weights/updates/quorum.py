"""Whether an update goes on, by what was found of its replicas (`weights.policy`). Pure."""

import math
from collections.abc import Mapping

from gateway.config.schema import WeightsConfig
from gateway.fleet.replica import Replica
from gateway.weights.verdicts import Finding, Result


def ended_by(
    config: WeightsConfig, findings: Mapping[Replica, Finding], *, waiting: int = 0, witnesses: int = 0
) -> Replica | None:
    """The replica that ends the update; None where it goes on.

    `waiting` are replicas that may pass yet. With policy `quorum` those that fail are left out, once so many
    `witnesses` have passed; with `all` nobody is.
    """
    failed = [replica for replica, finding in findings.items() if finding.result is Result.FAILED]
    passed = sum(finding.may_serve for finding in findings.values())
    is_quorum = config.policy == "quorum"
    needed = max(1, math.ceil(config.quorum * (len(findings) + waiting))) if is_quorum else 1
    is_tolerated = not failed or (is_quorum and passed >= witnesses)
    if is_tolerated and passed + waiting >= needed:
        return None
    return next(iter(failed or findings))
