"""Studies of the gateway's CPU and memory beside a pass-through."""
