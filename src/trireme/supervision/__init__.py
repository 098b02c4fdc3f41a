"""Keeps a run alive: the health of its parts, their incidents, and how often they may be started again.

`roster`, `restarts` and `status` know neither Ray nor the rooms; `supervisor` monitors the actors.
"""
