"""Starts the rooms of a run in their places. The only package that imports all rooms."""
