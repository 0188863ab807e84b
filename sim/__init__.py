"""The simulated engine: a server with vLLM's routes and made-up tokens at a set speed."""
