"""`rollout-gateway doctor`: finds settings of the gateway and of trainers that cost speed, memory or correctness.
It reads files, and runs none."""
