"""What a run measures, and its verdict: series, figures, thresholds, causes."""
