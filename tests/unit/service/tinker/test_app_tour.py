"""Every public method of the client's classes, called against the server; the docs have the table."""

import pytest
from tinker_calls import BASE_MODEL, CALLS, NOTES
from tinker_support import tinker_server
from tinker_tour import Outcome, methods, sync_name, tour

from make_tinker_docs import TARGET, page

LEAST = 80


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    with tinker_server(tmp_path_factory.mktemp("tour"), base=BASE_MODEL) as served:
        return tour(served)


def test_no_method_is_left_out() -> None:
    assert {sync_name(*method) for method in methods()} == set(CALLS)
    assert set(NOTES) <= set(CALLS)


def test_most_methods_work_and_the_others_are_refused_in_a_sentence(outcomes: list[Outcome]) -> None:
    assert sum(not outcome.refusal for outcome in outcomes) >= LEAST
    for outcome in outcomes:
        assert not outcome.refusal or "; " in outcome.refusal, "a refusal names the alternative"


def test_the_docs_have_the_table(outcomes: list[Outcome]) -> None:
    """On failure: python scripts/make_tinker_docs.py"""
    assert TARGET.read_text() == page(outcomes)
