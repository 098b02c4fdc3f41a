"""The deadline of an update."""

import pytest
from orchestrator_fakes import small_config

from orchestrator.update import ANSWER_S, update_deadline_s


@pytest.mark.parametrize(
    ("replicas", "max_updating", "turns"), [(1, None, 1), (33, None, 1), (33, 1, 33), (33, 8, 5), (2, 8, 1)]
)
def test_an_update_may_take_as_many_turns_as_it_has(replicas: int, max_updating: int | None, turns: int) -> None:
    """And one more, for a replica that still takes the version before."""
    config = small_config()
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"max_updating": max_updating})})
    expected_s = (turns + 1) * config.timeouts.update_s + config.patience_s + ANSWER_S
    assert update_deadline_s(config, replicas) == expected_s
