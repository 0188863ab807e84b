"""`rollout-gateway tune`: measures settings of an engine on the user's own hardware, and ends with the best."""
