"""Commits: how they are written, what proves that one is whole, where they lie, and how a run goes on from one.

`files` is what the rooms write with; `manifest` is the commit; `store` keeps the commits of one run directory; `resume`
chooses the one to go on from.
"""
