"""The commands `rl`, `sft`, `inference` and `trireme`: from the command line to a run."""
