"""Plans: what a run will occupy and do, worked out before anything starts."""
