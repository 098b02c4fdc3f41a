"""Examines the nodes of a cluster for a run: collects a report of each node, tests the links between nodes, finds
faults.

Nothing here imports Ray: `trireme.launch.doctor` runs an `Examiner` on each node.
"""
