"""The parts of the gateway that every kind of weight update works with."""

from dataclasses import dataclass

from gateway.config.schema import WeightsConfig
from gateway.fleet.fleet import Fleet
from gateway.weights.canary import Canary
from gateway.weights.catch_up import CatchUp
from gateway.weights.pauses import Pauses
from gateway.weights.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class Parts:
    """Made once by the coordinator, and handed to the update machine and to each kind of update."""

    config: WeightsConfig
    fleet: Fleet
    canary: Canary
    pauses: Pauses
    snapshots: Snapshots
    catch_up: CatchUp
