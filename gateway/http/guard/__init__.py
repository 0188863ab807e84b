"""Protection of the rollout URL beside the checks of `gateway.http.access`: keys."""
