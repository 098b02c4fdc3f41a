"""A replica that lives and answers, but wrongly: the real pipeline and router, one such replica and an honest one.

Nothing of what it gives is trained on. What it does once fails a rollout, which is tried again; what it always does is
the end of it, and the run goes on with the other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
from orchestrator_fakes import Problems, Run, problems_of, small_config, whole_run
from replica_support import IdleReplica, fleet, router_of

from inference.router import SENSELESS, Router
from trireme.core.errors import LimitReached, RoomFailed
from trireme.core.sampler import OnVersions
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan

VOCABULARY = 1000
Wrong = Callable[[SampledSequence], SampledSequence]


class Replica(IdleReplica):
    """Answers with the last token of the prompt, and with what `wrong` makes of it."""

    def __init__(self, index: int, wrong: Wrong | None = None) -> None:
        self.name, self.index = f"replica {index}", index
        self.wrong = wrong
        self.answers = 0

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampledSequence]]:
        for index, request in enumerate(requests):
            self.answers += 1
            spans = (VersionSpan(self.identity, 0, 1),)
            answer = SampledSequence(np.asarray(request.prompt[-1:], np.int32), np.float32([-1.0]), "stop", spans)
            yield index, self.wrong(answer) if self.wrong else answer


WRONG: dict[str, Wrong] = {
    "garbage": lambda answer: replace(answer, tokens=answer.tokens + VOCABULARY),
    "negative": lambda answer: replace(answer, tokens=answer.tokens - VOCABULARY),
    "nan": lambda answer: replace(answer, logprobs=answer.logprobs * np.float32(np.nan)),
    "shorter": lambda answer: replace(answer, logprobs=answer.logprobs[:0]),
}


class ConnectedRouter(Router):
    """A router that calls whoever connects to it, as the sampler that a run of fakes makes."""

    def connect(self, on_versions: OnVersions) -> Router:
        self._on_versions = on_versions
        return self


def run_with(bad: Replica, *good: Replica, **options: int) -> Run:
    router = router_of(dict(enumerate((bad, *good))), kind=ConnectedRouter, vocab_size=VOCABULARY)
    settings = {"max_steps": 10, "retries": 2} | options
    return Run(small_config(**settings), Problems(), sampler=router)  # type: ignore[arg-type]


def assert_nothing_was_lost(run: Run) -> None:
    last = run.rows[-1]
    trained = [problem for batch in run.batches for problem in dict.fromkeys(problems_of(batch))]
    assert last["ledger/failed"] == 0
    assert len(trained) == len(set(trained)) == last["ledger/trained"] == 2 * run.config.max_steps
    for batch in run.batches:
        for minibatch in batch:
            columns = minibatch.batch.columns
            assert np.isfinite(columns["logprobs"]).all()
            assert ((columns["target_tokens"] >= 0) & (columns["target_tokens"] < VOCABULARY)).all()


@pytest.mark.parametrize("wrong", WRONG)
def test_one_whose_answers_never_make_sense_is_used_no_more(wrong: str) -> None:
    bad, good = Replica(0, WRONG[wrong]), Replica(1)
    run = asyncio.run(whole_run(run_with(bad, good)))
    assert_nothing_was_lost(run)
    assert bad.answers == SENSELESS < good.answers
    assert sum(row.get("rollout_errors/BadSample", 0) for row in run.rows) == SENSELESS - 1
    assert run.rows[-1]["ledger/dispatched"] >= run.rows[-1]["ledger/trained"]


def test_one_senseless_answer_of_many_fails_a_try_and_nothing_else() -> None:
    answers = 0

    def sometimes(answer: SampledSequence) -> SampledSequence:
        nonlocal answers
        answers += 1
        return WRONG["nan"](answer) if answers % 3 == 0 else answer

    bad, good = Replica(0, sometimes), Replica(1)
    run = asyncio.run(whole_run(run_with(bad, good)))
    assert_nothing_was_lost(run)
    assert bad.answers > 2 * SENSELESS, "it is still used"


def test_when_all_answer_nonsense_the_run_ends_and_says_of_whom() -> None:
    """Then it is what is sampled from, not a replica."""
    message = r"replica 0 gave 4 answers in a row that make no sense|BadSample"
    with pytest.raises((RoomFailed, LimitReached), match=message):
        asyncio.run(whole_run(run_with(Replica(0, WRONG["nan"]), Replica(1, WRONG["nan"]))))


async def test_a_failure_that_several_calls_see_is_reported_once() -> None:
    router, _ = await fleet(2)
    target, reports = router._targets[0], []
    router.source.report = lambda *report: reports.append(report)
    for _ in range(2):
        router._fail(target, RoomFailed("replica 0 died"))
    assert len(reports) == 1
