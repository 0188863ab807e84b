"""Translations between dialects: bodies and replies, without a call of any engine."""
