"""The tools of the command `trireme`, which look at runs and take models out of them. Only `scale` changes a run."""
