"""The doctor's rules: pure functions in tables, one module per subject."""
