"""Batches of /v1/completions whose connection broke: they run on for a while, and an equal request adopts them."""
