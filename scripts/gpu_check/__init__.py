"""The parts of `scripts/gpu_check.py`: checks of what only a machine with GPUs can show."""
