"""An engine as a guarded child process: its command line, its start, its log, and why a start failed."""
