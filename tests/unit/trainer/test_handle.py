"""The trainer's handle, as far as it needs no cluster; `tests/e2e/test_trainer.py` has its verbs."""

import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from trainer_support import make_batch, make_config

from trainer import handle
from trainer.batching import RankAssignment, ShardOutput, SummarizedOutput
from trainer.handle import TrainerHandle
from trireme.config.trainer import ATTENTION
from trireme.core.batch import StoredBatch
from trireme.core.errors import RoomFailed
from trireme.core.transport import Session
from trireme.core.types import AdamParams
from trireme.core.weights import AdapterSpec, PublishedWeights


def test_options_for_another_number_of_processes_are_refused():
    with pytest.raises(ValueError, match=r"MeshSizes.*shard=2.* got 2"):
        TrainerHandle.start(make_config("m", trainer__shards=2, trainer__replicate=2), [{}, {}], None)


def test_each_shard_learns_what_a_replica_takes_of_its_gpu(monkeypatch):
    calls = []

    class Actor:
        def options(self, **_options):
            return self

        def remote(self, *args):
            calls.append(args)
            return self

        rendezvous = setup = property(lambda self: self)

    monkeypatch.setattr(handle.ray, "remote", lambda **_groups: lambda _actor: Actor())
    monkeypatch.setattr(handle.ray, "cluster_resources", dict)
    TrainerHandle.start(
        make_config("m", trainer__shards=2), [{"num_gpus": 0.5}] * 2, None, taken_share=0.4, offloads=True
    )
    assert [call[4:] for call in calls if len(call) > 1] == [(0.4, True, None)] * 2


@pytest.mark.parametrize(("within_s", "sends_for_s"), [(20.0, 20.0), (900.0, 200.0)])
def test_sending_is_given_up_before_a_gather_that_waits_for_it(monkeypatch, within_s, sends_for_s):
    config = make_config("m", timeouts__collective_s=400.0)
    offers = []
    offer = lambda offer: offers.append(offer) or Session(1, 0, {0: 0})  # noqa: E731
    trainer = TrainerHandle(config, [], [], None, offer=offer, offered_s=within_s)
    monkeypatch.setattr(trainer, "_call", lambda _verb: [((64,), ("host", 1))])
    session = trainer._session(7)
    assert [offer.timeout_s for offer in offers] == [sends_for_s]
    assert sends_for_s - 5.0 < session.left_s <= sends_for_s


def test_replicas_learn_in_which_session_a_version_was_sent(monkeypatch):
    trainer = TrainerHandle(make_config("m"), [], [], None, offer=lambda _: Session(1, 0, {0: 0}))
    answers = {"terms": [((64,), ("host", 1))]}
    monkeypatch.setattr(
        trainer, "_call", lambda verb, *sent: answers.get(verb) or [PublishedWeights(None, {0: sent[-1]})]
    )
    published = trainer.publish_weights(7)
    assert published.session.members == (0,)
    assert published.source == (published.session,), "which the shards sent it in"


def test_nothing_is_offered_once_a_shard_sends_no_more(monkeypatch):
    trainer = TrainerHandle(make_config("m"), [], [], None, offer=lambda _: Session(1, 0, {0: 0}))
    endpoints = [("host", 1), ("host", 2)]
    monkeypatch.setattr(trainer, "_call", lambda _verb: [((64,), endpoint) for endpoint in endpoints])
    assert trainer._session(0)
    endpoints[0] = None
    assert trainer._session(1) is None
    assert trainer._session(2) is None


def test_shards_get_updates_and_adapters_and_exchange_those_only_for_another(monkeypatch):
    trainer, calls = TrainerHandle(make_config("m"), [], [], None), []
    monkeypatch.setattr(trainer, "_call", lambda _verb, *args: calls.append(args) or [None])
    spec, update = AdapterSpec(8, 16.0, ATTENTION, 1), (AdamParams(), 2.0)
    trainer.add_adapter("a", spec)
    for name in ("", "a", "a", "b", "a"):
        trainer.use_adapter(name)
    trainer.optim_step(*update)
    assert calls == [("a", spec, None), ("a",), ("b",), ("a",), update]


ASSIGN = RankAssignment(2, 100, "auto")


class StandIn:
    """A shard that computes a log-probability of -1 per token of its datums (`indices`), and keeps what it trains."""

    def __init__(self, part, indices):
        self.part, self.indices, self.trained = part, indices, {}

    def forward_backward(self, loss_fn, loss_fn_config, provenance, wants_logprobs):
        places = self.part.places(self.indices)
        self.trained = {d: self.part.batch.datum(n) for d, n in zip(self.indices, places, strict=True)}
        output = self.output()
        return replace(output, logprobs=output.logprobs[: None if wants_logprobs else 0])

    def output(self):
        return ShardOutput(tuple(self.indices), np.full(self.part.lengths[self.indices].sum(), -1, np.float32), {})

    def forward_summarized(self, which, name, summarize):
        column, batch = self.output().as_column(self.part), self.part.batch
        sums = summarize(replace(batch, columns={**batch.columns, name: column}))
        return SummarizedOutput(np.array(self.indices, np.int64), column, sums[:, self.part.places(self.indices)])


class Shards(TrainerHandle):
    """A handle of two such shards that notes what they are asked."""

    def __init__(self):
        super().__init__(make_config("m"), [None] * 2, [None] * 2, None)
        self.calls, self.trained = [], {}

    def _call(self, verb, *args, timeout_s=None):
        assert verb == "rank_assignment"
        return [ASSIGN] * 2

    def _call_with(self, batch, verb, *args):
        self.calls.append(verb)
        parts_R = [part.opened(lambda column, owner: column) for part in batch.parts_R]
        owns_R = [indices.tolist() for indices in ASSIGN(batch.forest)]
        assert sorted(itertools.chain(*owns_R)) == list(range(len(batch))), "each datum is one shard's own"
        shards_R = list(map(StandIn, parts_R, owns_R))
        outputs_R = [getattr(shard, verb)(*args) for shard in shards_R]
        self.trained = {d: datum for shard in shards_R for d, datum in shard.trained.items()}
        return outputs_R


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("loss", "sequences", "passes"), [("gspo", [0, 0, 1], 2), ("gspo", None, 1), ("ppo", [0] * 3, 1)]
)
def test_the_ratio_of_a_sequence_in_several_datums_is_known_before_the_backward_pass(
    loss, sequences, passes, is_stored
):
    batch, shards = make_batch((3, 2, 2)), Shards()
    if sequences:
        batch = replace(batch, sequences=np.array(sequences))
    stored = StoredBatch.store(batch.find_forest(), batch.sequences, batch.take, ASSIGN)
    output = shards.forward_backward(stored if is_stored else batch, loss)
    assert shards.calls == ["forward_summarized", "forward_backward"][-passes:]
    if is_stored:
        assert not len(output.logprobs), "they stay with the shards"
        assert output.metrics == {}
    else:
        assert output.logprobs.tolist() == [-1] * 7
    trained = [shards.trained[d].loss_fn_inputs for d in range(3)]
    if passes == 1:
        assert all("sequence_log_ratio" not in columns for columns in trained)
        return
    log = np.where(batch.columns["mask"] != 0, -1 - batch.columns["logprobs"], 0)
    first, second = log[:5].sum() / (3 + 2 - 2), log[5:].sum() / (2 - 1)
    ratios = np.concatenate([columns["sequence_log_ratio"].data for columns in trained])
    assert ratios == pytest.approx([first] * 5 + [second] * 2)


def test_a_loss_of_all_datums_fetches_a_stored_batch(monkeypatch):
    batch, shards, prompts = make_batch((3, 2, 2)), Shards(), []
    stored = StoredBatch.store(batch.find_forest(), batch.sequences, batch.take, ASSIGN)
    monkeypatch.setattr(shards, "forward", lambda batch: SimpleNamespace(logprobs=np.zeros(7, np.float32)))

    def loss(data_D, p_D):
        prompts.extend(datum.model_input.to_ints() for datum in data_D)
        return sum(p.sum() for p in p_D), {}

    shards.forward_backward_custom(stored, loss)
    assert prompts == [batch.datum(d).model_input.to_ints() for d in range(3)]


def test_importing_it_imports_neither_torch_nor_transformers():
    check = "import sys, trainer.handle; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_shards_that_have_started_write_their_traces_before_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def actor(rank: int) -> Any:
        return SimpleNamespace(rank=rank, end_trace=SimpleNamespace(remote=lambda: f"trace of {rank}"))

    def get_all(refs: list[str], *, owners: list[str], timeout_s: float) -> None:
        assert owners == ["trainer shard 0", "trainer shard 2"]
        assert timeout_s == handle.STOP_S
        calls.append(refs)
        raise RoomFailed("trainer shard 2 died")

    def kill(shard: Any, *, no_restart: bool) -> None:
        assert no_restart
        calls.append(shard.rank)

    monkeypatch.setattr(handle, "ray", SimpleNamespace(kill=kill))
    monkeypatch.setattr(handle.waits, "get_all", get_all)
    monkeypatch.setattr(handle.waits, "ready", lambda refs, _: {ref: None for ref in refs if ref != "starting"})
    ready_R = cast(Any, ["started", "starting", "started"])
    TrainerHandle(make_config("m"), [actor(rank) for rank in range(3)], ready_R, None).stop()
    assert calls == [["trace of 0", "trace of 2"], 0, 1, 2]
