"""`rollout-gateway plan`: memory and speed of a rollout fleet, before anything is started."""
