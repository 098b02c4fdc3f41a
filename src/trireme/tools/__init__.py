"""The command `trireme`: looking at runs, and taking models out of them. Nothing here changes a run."""
