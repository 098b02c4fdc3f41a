"""The ways for published weights to travel, one module for each; `trireme.core.transport` lists them.

A module here may import the library that it sends with (Ray, a communicator), and no room. `packing` is shared: it
lays tensors out in flat byte buckets.
"""
