"""Code that runs inside vLLM's processes: plugin, worker extension, middleware, loads in place."""
