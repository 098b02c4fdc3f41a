"""The tools behind the command `trireme`: they show runs, and export models from runs. Only `scale` changes a run."""
