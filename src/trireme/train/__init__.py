"""The training loops, and their guards."""
