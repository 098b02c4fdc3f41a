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
    reason = too_old(floor, floor + age, bound)
    if reason:
        assert f"version {floor}" in reason
        assert f"age {age}, at most {bound}" in reason
        with pytest.raises(ProvenanceError, match=rf"age {age}, above .*max_steps_off_policy = {bound}\."):
            ledger.take(floor + age, 1)
    else:
        assert ledger.take(floor + age, 1)
