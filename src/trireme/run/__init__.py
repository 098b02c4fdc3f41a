"""A run directory: its files, and the schedule of checkpoints."""
