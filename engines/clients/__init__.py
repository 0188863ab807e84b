"""HTTP clients of engine servers, one per kind, all speaking vLLM's dialect upwards."""
