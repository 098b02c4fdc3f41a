"""The age rule of sessions is that of the ledger."""

import pytest

from orchestrator.ledger import Group, Ledger
from service.sessions.ages import too_old
from trireme.core.errors import ProvenanceError


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("age", range(6))
def test_a_turn_is_refused_where_the_ledger_would_refuse_its_group(bound: int, age: int) -> None:
    floor = 2
    ledger = Ledger(1, bound, "drop", max_steps=100)
    ledger.batch = floor + age
    ledger.active[0] = Group(0, "p", floor, finished=True)
    refused = too_old(floor, floor + age, bound) is not None
    if refused:
        with pytest.raises(ProvenanceError, match=rf"age {age}, above .*max_steps_off_policy = {bound}\."):
            ledger.take(floor + age, 1)
    else:
        assert ledger.take(floor + age, 1)


def test_the_reason_says_what_is_allowed() -> None:
    reason = too_old(2, 6, 3)
    assert reason is not None
    assert "version 2" in reason
    assert "age 4, at most 3" in reason
