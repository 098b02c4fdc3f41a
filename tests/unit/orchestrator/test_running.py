"""The trainer is lost and the orchestrator lives on: which running groups continue, and from where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orchestrator_fakes import Run, published, quiesce, small_config
from talks import Slow, Talks

from orchestrator.ledger import Group, Ledger
from orchestrator.running import RunningGroups
from orchestrator.state import OrchestratorState
from orchestrator.unfinished import UnfinishedGroup
from trireme.core.types import WeightIdentity

OLD, GONE = WeightIdentity(1, 0, "d0"), WeightIdentity(1, 1, "gone")
RUNNER: Any = SimpleNamespace(size=2, sampling=SimpleNamespace(temperature=1.0))


def made_by(*identities: WeightIdentity) -> Any:
    """Stands for a trajectory."""
    return SimpleNamespace(identities=set(identities))


class Task:
    """Stands for the task of a group."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loss:
    """Group 0 and group 1 ran at the commit; group 2 was dispatched later. Of group 1 the commit has one rollout."""

    def __init__(self) -> None:
        self.ledger = Ledger(2, 1, "requeue", 2, 100)
        self.ledger.acknowledge({0: 0})
        self.groups = [self.ledger.dispatch(lambda: f"p{self.ledger.tally.dispatched}") for _ in range(2)]
        state = json.loads(json.dumps(self.ledger.state_dict()))
        kept = UnfinishedGroup(Group(**vars(self.groups[1])), (made_by(OLD), None), 1.0)
        self.state: Any = SimpleNamespace(ledger=state, running=(kept,), finished=())
        self.groups.append(self.ledger.dispatch(lambda: "p2"))
        self.running = RunningGroups(lambda problem: RUNNER)
        self.tasks = [Task() for _ in self.groups]

    def begin(self, group: Group, *identities: WeightIdentity) -> None:
        self.running.begin(group, True).finished[0] = made_by(*identities)
        self.running.add_task(group, self.tasks[group.index])  # type: ignore[arg-type]

    def load(self, known: Collection[WeightIdentity] = (OLD,), *over: Any) -> tuple[list[str], str]:
        """Returns what became of each group, and the share that was kept."""
        finished, share = self.running.load(self.ledger, self.state, over, known)

        def fate(index: int) -> str:
            if index in finished:
                return "over"
            if index in self.running:
                return "lives on"
            return "restored" if index in self.running._restored else "stopped"

        for index, group in enumerate(self.groups):
            lives = self.ledger.active.get(index) is group
            assert lives == (fate(index) in ("lives on", "over"))
            assert self.tasks[index].cancelled == (fate(index) in ("restored", "stopped"))
        self.ledger.counts()
        return [fate(index) for index in range(len(self.groups))], str(share)


def test_groups_of_the_commit_live_on_and_later_ones_are_stopped() -> None:
    loss = Loss()
    for group in loss.groups:
        loss.begin(group, OLD)
    said = "4 of 4 unfinished rollouts were kept (4 of them live on)"
    assert loss.load() == (["lives on", "lives on", "stopped"], said)
    assert loss.ledger.tally.dispatched == 2


@pytest.mark.parametrize("known", [(), (GONE,)])
def test_with_a_token_of_weights_that_the_commit_does_not_name_it_continues_from_the_commit(known: Any) -> None:
    loss = Loss()
    for group in loss.groups:
        loss.begin(group, OLD)
    assert loss.load(known)[0] == ["stopped", "restored", "stopped"]


def test_one_such_token_is_enough() -> None:
    loss = Loss()
    loss.begin(loss.groups[0], OLD)
    loss.begin(loss.groups[1], OLD, GONE)
    loss.begin(loss.groups[2], OLD)
    said = "3 of 4 unfinished rollouts were kept (2 of them live on)"
    assert loss.load() == (["lives on", "restored", "stopped"], said)


@pytest.mark.parametrize("other", [{"problem": "another"}, {"requeues": 1}])
def test_another_group_with_the_same_index_is_stopped(other: dict[str, Any]) -> None:
    loss = Loss()
    loss.groups[0] = Group(**{**vars(loss.groups[0]), **other})
    for group in loss.groups:
        loss.begin(group, OLD)
    assert loss.load()[0] == ["stopped", "lives on", "stopped"]


@pytest.mark.parametrize("identity", [OLD, GONE])
def test_a_group_that_has_finished_since_is_over_if_its_tokens_are_known(identity: WeightIdentity) -> None:
    loss = Loss()
    group = loss.groups[0]
    for other in loss.groups[1:]:
        loss.begin(other, OLD)
    loss.ledger.finish(group)
    loss.tasks[0].cancelled = identity is GONE  # it has none any more
    scored = SimpleNamespace(group=group, identities={identity})
    fates, said = loss.load((OLD,), scored)
    assert fates == ["over" if identity is OLD else "stopped", "lives on", "stopped"]
    assert said.startswith("4 of 4" if identity is OLD else "2 of 4")
    assert group.finished


# ---- the pipeline


CONFIG = small_config(1, 4, stale_policy="wait", max_steps_off_policy=2)


async def lost_after_one_step(known: Collection[int], keeps: bool, directory: Path) -> tuple[Run, Talks, str]:
    """Of group 1 rollout 0 has two turns and rollout 1 is finished, all by version 0; group 2 waits for its first
    answer. Then the trainer is lost, and built again from the commit after step 0, which names the versions `known`.
    """
    dataset = Talks(keeps=keeps)
    run = Run(CONFIG, dataset, sampler=Slow())
    sampler: Any = run.sampler
    gates = [sampler.gate(1, 0, 2), sampler.gate(2, 0, 0), sampler.gate(2, 1, 0)]
    await run.__aenter__()
    await run.step(0)
    await quiesce()
    run.pipeline.snapshot().write(directory)
    waits = asyncio.create_task(run.pipeline.next_minibatch(1, 0))
    await quiesce()
    waits.cancel()
    await run.pipeline.hold()
    requests = len(sampler.requests)
    await quiesce()
    assert len(sampler.requests) == requests, "nothing is sampled or dispatched"
    share = run.pipeline.load(
        OrchestratorState.read(directory), [WeightIdentity(0, version, f"d{version}") for version in known]
    )
    await run.pipeline.update_weights(published(1))
    for gate in gates:
        gate.set()
    return run, dataset, str(share)


def test_a_group_survives_with_its_first_turns(tmp_path: Path) -> None:
    async def scenario() -> None:
        run, dataset, share = await lost_after_one_step([0, 1], False, tmp_path)
        assert share == "4 of 4 unfinished rollouts were kept (4 of them live on)"
        for step in range(1, 4):
            await run.step(step)
        await run.pipeline.stop()
        assert set(dataset.begun.values()) == {1}, "no environment was made twice"
        batch = run.batches[1][0].batch
        versions = batch.columns["versions"][batch.columns["mask"] > 0].tolist()
        assert versions == [0, 0, 1, 1, 0, 0, 0, 0], "the first two turns are those from before"
        assert [each.trained[0]["floor"] for each in run.released] == [0, 0, 0, 1]
        assert run.rows[-1]["ledger/trained"] == run.rows[-1]["ledger/dispatched"] == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("keeps", [False, True])
def test_a_group_with_other_tokens_begins_again_from_the_commit(keeps: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        run, dataset, share = await lost_after_one_step([1], keeps, tmp_path)
        await run.step(1)
        await run.pipeline.stop()
        assert share.startswith(f"{2 + 2} of 4" if keeps else "3 of 4")
        assert dataset.begun[1, 0] == (1 if keeps else 2)

    asyncio.run(scenario())


def test_a_pipeline_that_failed_itself_does_not_live_on() -> None:
    async def scenario() -> None:
        run = Run(CONFIG)
        async with run:
            run.sampler.update_error = ArithmeticError("broken")
            await run.pipeline.update_weights(published(1))
            await quiesce()
            with pytest.raises(ArithmeticError, match="broken"):
                await run.pipeline.hold()

    asyncio.run(scenario())
