"""One weight update: its state machine, its record, and how each transport carries it out."""
