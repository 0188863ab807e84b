"""Load test reports: series, thresholds, charts, and the page."""
