"""Runs one inference engine on one replica. Knows nothing of routing, trainers or the gateway's dialects."""
