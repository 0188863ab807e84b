"""Readers of trainer files: shell scripts, verl configurations, TRL arguments."""
