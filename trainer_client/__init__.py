"""The public names for trainers. Loads neither ray nor torch; only a weight push loads torch."""

from trainer_client.batch import Batch, Progress
from trainer_client.blocking import BlockingBatch, BlockingRolloutClient, BlockingRolloutPool
from trainer_client.client import RolloutClient
from trainer_client.pool import RolloutPool
from trainer_client.results import Completion, Outcome, Rollout, WeightSpan
from trainer_client.sampling import SamplingParams
from trainer_client.transports.sender import WeightSender

__all__ = [
    "Batch",
    "BlockingBatch",
    "BlockingRolloutClient",
    "BlockingRolloutPool",
    "Completion",
    "Outcome",
    "Progress",
    "Rollout",
    "RolloutClient",
    "RolloutPool",
    "SamplingParams",
    "WeightSender",
    "WeightSpan",
]
