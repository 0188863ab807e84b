"""Client dialects: each decodes and validates a request, generates, and assembles the reply."""
