"""The commands `rl`, `sft` and `trireme`, from a command line to a run."""
