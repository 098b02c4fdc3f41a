"""The most that an owner may hold at the same time."""

import pytest

from service.quotas import QuotaUsed, check_count


def test_counts_are_compared_with_what_is_there() -> None:
    check_count("a", "models", 2, 1, 5.0)
    check_count("a", "samples", None, 10_000, 1.0)
    with pytest.raises(QuotaUsed, match="the quota of a is used up: models=2, and there are 2") as refused:
        check_count("a", "models", 2, 2, 5.0)
    assert refused.value.wait_s == 5.0
