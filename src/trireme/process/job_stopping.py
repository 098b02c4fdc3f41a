"""Stops the jobs of a Ray cluster and waits until they have ended, so that their runs commit:

    python -m trireme.process.job_stopping 120

Launch files for Kubernetes call it on the head before that ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from trireme.core.errors import EXIT_FAILED, EXIT_OK

TICK_S = 0.5


class Jobs(Protocol):
    """The jobs of a cluster."""

    def running(self) -> list[str]:
        """Returns the ids of those that have not ended."""

    def stop(self, job: str) -> None:
        """Asks one to end."""


class ClusterJobs:
    """The jobs of the cluster on this machine, by its job server."""

    def __init__(self) -> None:
        from ray.job_submission import JobSubmissionClient

        self._client = JobSubmissionClient()

    def running(self) -> list[str]:
        """Returns the ids of those that have not ended."""
        return [job.submission_id for job in self._client.list_jobs() if job.submission_id and not _ended(job.status)]

    def stop(self, job: str) -> None:
        """Asks one to end, by SIGTERM; Ray kills it after RAY_JOB_STOP_WAIT_TIME_S."""
        self._client.stop_job(job)


def _ended(status: str) -> bool:
    return str(getattr(status, "value", status)) in ("STOPPED", "SUCCEEDED", "FAILED")


def stop_all(jobs: Jobs, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """Stops all jobs, and returns the ids of those that have not ended within `timeout_s` seconds."""
    for job in jobs.running():
        jobs.stop(job)
    deadline = time.monotonic() + timeout_s
    while (left := jobs.running()) and time.monotonic() < deadline:
        sleep(TICK_S)
    return left


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    left = stop_all(ClusterJobs(), float(arguments[0]))
    if left:
        print(f"error: {', '.join(left)} did not end within {arguments[0]} s", file=sys.stderr)
    return EXIT_FAILED if left else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
