"""Says who holds a batch that does not come."""

from __future__ import annotations

from orchestrator.ledger import Ledger


def missing(ledger: Ledger, requests: int) -> str:
    """Returns who holds the missing groups, while replicas have n `requests`, with the state of the ledger."""
    running = [f"{g.problem} (dispatched at version {g.floor})" for g in ledger.active.values() if not g.finished]
    if requests and not ledger.replicas:
        holds = f"no inference replica serves, and {requests} requests wait for one"
    elif requests:
        holds = f"the inference replicas hold it, with {requests} requests"
    elif running:
        holds = "the environments hold it: no request is with a replica"
    else:
        holds = "no group is running: its slots wait for a version that the replicas acknowledge"
    return (
        f"{holds}. Groups: {ledger.counts()}; oldest problem still sampling: {running[0] if running else 'none'}; "
        f"versions acknowledged by replicas: {ledger.replicas}"
    )
