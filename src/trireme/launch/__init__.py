"""Starts the rooms of a run on the machines that the plan gives them. The only package that imports all rooms."""
