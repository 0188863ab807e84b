"""`rollout-gateway doctor`: reads configurations of the gateway and of trainers and says what in them costs speed,
memory or truth. Files are read and never run; rules are pure functions in tables; figures come from docs/benchmarks.md.
"""
