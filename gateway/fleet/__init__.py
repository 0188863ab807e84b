"""The replicas: their states and versions, how rollouts are placed on them, and the calls that reach them all."""
