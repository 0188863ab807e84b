"""The part of the campaign that hurts rollouts."""
