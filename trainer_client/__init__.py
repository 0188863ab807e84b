"""The public names for trainers. Loads neither ray nor torch; only a weight push loads torch."""

from trainer_client.batch import Batch
from trainer_client.blocking import BlockingBatch, BlockingRolloutClient
from trainer_client.client import RolloutClient
from trainer_client.results import Completion, Rollout, WeightSpan
from trainer_client.sampling import SamplingParams
from trainer_client.sessions.calls import Sessions
from trainer_client.sessions.groups import BlockingSessionGroups, SessionGroup, SessionGroups
from trainer_client.sessions.records import Session
from trainer_client.sessions.trajectories import Trajectory, trajectories_of
from trainer_client.transports.sender import WeightSender

__all__ = [
    "Batch",
    "BlockingBatch",
    "BlockingRolloutClient",
    "BlockingSessionGroups",
    "Completion",
    "Rollout",
    "RolloutClient",
    "SamplingParams",
    "Session",
    "SessionGroup",
    "SessionGroups",
    "Sessions",
    "Trajectory",
    "WeightSender",
    "WeightSpan",
    "trajectories_of",
]
