"""The training loops, and what guards them."""
