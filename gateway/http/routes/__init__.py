"""Routes of the rollout URL, one class per subject, each with `add_routes`."""
