"""Load and chaos of agents' sessions."""
