"""Placement of rollouts: attempts, the queue, the choice of a replica, sessions."""
