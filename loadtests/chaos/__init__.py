"""The chaos campaign: faults, the witness that checks every rollout, and the run."""
