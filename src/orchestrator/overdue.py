"""Says which part of the run is the cause when a batch does not become complete."""

from __future__ import annotations

from orchestrator.ledger import Ledger


def missing(ledger: Ledger, requests: int) -> str:
    """Returns a text for an error. It says which part of the run delays the groups that the batch lacks (replicas,
    environments or dispatch), and gives the counts of the ledger. `requests`: the number of training requests that
    wait for an answer."""
    running = [f"{g.problem} (dispatched at version {g.floor})" for g in ledger.active.values() if not g.finished]
    if requests and not ledger.replicas:
        holds = f"no inference replica serves, and {requests} requests wait for one"
    elif requests:
        holds = f"the cause is in the inference replicas, which have {requests} unanswered requests"
    elif running:
        holds = "the cause is in the environments: no request waits for a replica"
    else:
        holds = "no group is running: its slots wait for a version that the replicas acknowledge"
    return (
        f"{holds}. Groups: {ledger.counts()}; oldest problem still sampling: {running[0] if running else 'none'}; "
        f"versions acknowledged by replicas: {ledger.replicas}"
    )
