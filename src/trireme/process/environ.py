"""The process environment of a run, prepared before Ray is imported: Ray reads much of it at that moment."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from trireme.config import CommonConfig


def cluster_address(config: CommonConfig) -> str | None:
    """Address of the cluster to join (`RAY_ADDRESS` is what `ray job submit` sets); none = start one here."""
    return config.cluster.address or os.environ.get("RAY_ADDRESS")


def prepare_local_cluster(threads: int, deterministic: bool) -> None:
    """For a cluster started here, whose processes inherit this environment: `threads` for each of them (unless
    OMP_NUM_THREADS says otherwise; `deterministic` does not let it), the priority that other programs have (Ray's own
    default for workers, nice 15, would leave no room below it for what can wait), and a token of its own for
    authentication. (Without one Ray writes a token into the home directory, and says so at every start.)"""
    if deterministic or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("RAY_worker_niceness", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def prepare_existing_cluster() -> None:
    """Ray's clusters ask for a token by default, but a driver sends the one that it has only when told to."""
    has_token = "RAY_AUTH_TOKEN" in os.environ or (Path.home() / ".ray" / "auth_token").is_file()
    if "RAY_AUTH_MODE" not in os.environ and has_token:
        os.environ["RAY_AUTH_MODE"] = "token"
