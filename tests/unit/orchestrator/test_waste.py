"""How many of the tokens that groups sample are wasted, and why."""

from orchestrator.advantages import ScoredGroup
from orchestrator.ledger import Group
from orchestrator.waste import WastedTokens


class GroupOfTokens(ScoredGroup):
    """A group whose rollouts have this many tokens together."""

    tokens = 0


def scored(tokens: int) -> ScoredGroup:
    group = GroupOfTokens(Group(0, "p", 0), (), (), (), (), 1.0)
    object.__setattr__(group, "tokens", tokens)
    return group


def test_waste_is_counted_by_cause_until_it_is_taken() -> None:
    counts = WastedTokens()
    failing, failed, running = (counts.begin(index, 2) for index in range(3))
    failing.respond(0, 2)
    failing.fail(0)
    failing.respond(0, 10)
    failed.respond(1, 20)
    running.respond(0, 30)
    running.fail(1)
    counts.settle(0, scored(10))
    counts.settle(1, None)
    counts.drop(2, None)
    counts.drop(0, scored(10))
    counts.drop(3, None)  # it was restored, and has not been started
    assert counts.take() == {"waste/failed": 2 + 20, "waste/expired_running": 30, "waste/expired_finished": 10}
    assert counts.take() == {"waste/failed": 0, "waste/expired_running": 0, "waste/expired_finished": 0}


def test_a_resumed_run_has_the_counts_of_its_checkpoint() -> None:
    counts = WastedTokens()
    counts.begin(0, 2).respond(1, 5)
    counts.settle(0, None)
    state = counts.state_dict()
    counts = WastedTokens()
    counts.load_state_dict(state)
    assert counts.take()["waste/failed"] == 5
