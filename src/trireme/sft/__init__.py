"""Supervised training: `data` (from files to batches), `loop`, `launch` (the trainer in its places), `cli`."""
