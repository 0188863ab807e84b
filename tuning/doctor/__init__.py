"""`rollout-gateway doctor`: reads configurations of the gateway and of trainers, and finds settings that cost speed,
memory or correctness.

Files are read and never run; rules are pure functions in tables; figures come from docs/benchmarks.md.
"""
