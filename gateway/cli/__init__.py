"""The console script `rollout-gateway`."""
