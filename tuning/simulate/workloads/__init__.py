"""Workloads that are simulated: groups of a trainer, agents, and recorded requests."""
