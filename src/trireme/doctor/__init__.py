"""Examines the nodes of a cluster before a run: what each reports of itself, how they reach each other, what is wrong.

Nothing here imports Ray: `trireme.launch.doctor` runs an `Examiner` on each node.
"""
