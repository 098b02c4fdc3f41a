"""Decides how published weights travel where the configuration leaves it open."""

from __future__ import annotations

from trireme.config.schema import CommonConfig
from trireme.process.environ import Resources

UNPROVED = "broadcasts over NCCL have not been tried on several GPUs yet"
ONE_MACHINE = "on one machine the replicas map what the shards put there, and nothing is sent"
TRIED = "the first version is broadcast, and so are all others if it arrives"


def choose_transport(config: CommonConfig, resources: Resources) -> tuple[str, str]:
    """Returns the key of `trireme.core.transport.TRANSPORTS` by which published weights travel, and why, if that is not
    configured ("" otherwise). `auto` remains where a broadcast is tried."""
    if config.transport != "auto":
        return config.transport, ""
    if resources.compute_on_gpus(config):
        return "object_store", UNPROVED
    return ("auto", TRIED) if len(resources.nodes) > 1 else ("object_store", ONE_MACHINE)
