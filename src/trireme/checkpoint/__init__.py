"""Checkpoints: how they are written and verified, where they lie, and how a run resumes from one.

`files` writes and hashes; `manifest` is the checkpoint; `store` keeps the checkpoints of a run directory; `resume`
chooses one.
"""
