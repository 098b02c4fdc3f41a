"""A run directory: what is written there, and when commits are taken."""
