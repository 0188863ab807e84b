"""Load tests: trainer-shaped batches, Locust users, and benchmarks of the gateway against the engines behind it."""
