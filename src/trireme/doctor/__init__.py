"""Examines the nodes of a cluster for a run: the report of each node, the links between them, the faults.

Nothing here imports Ray: `trireme.launch.doctor` runs an `Examiner` on each node.
"""
