"""Side-by-side benchmarks; each prints both sides of one run."""
