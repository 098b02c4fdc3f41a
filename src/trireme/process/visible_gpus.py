"""Which GPUs an actor sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray


def seeing_own_gpus(options: Mapping[str, Any]) -> dict[str, Any]:
    """Ray's options of an actor that sees the GPUs it is given and no others: Ray shows one that is given none all of
    its node's. What `runtime_env` says of CUDA_VISIBLE_DEVICES stays."""
    # A process of its own kind costs a second, for which there is no reason where there are no GPUs.
    if options.get("num_gpus") or not ray.cluster_resources().get("GPU"):
        return dict(options)
    environment = options.get("runtime_env") or {}
    variables = {"CUDA_VISIBLE_DEVICES": "", **environment.get("env_vars", {})}
    return {**options, "runtime_env": {**environment, "env_vars": variables}}
