"""The callers of the trainer's handle with shared prefixes: the KL penalty, losses of the user's own and sessions of
agents compute what they compute with each sequence whole."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest
import torch
from agents_support import ask, rollout, user
from prefix_support import check_same_gradients, fill, gradients_of, make_forest
from renderer_support import QWEN3, bpe
from service_support import VERSION

# The tiny models are the end-to-end tests' too.
from trainer_support import make_model

from orchestrator.advantages import ScoredGroup, build_minibatch
from orchestrator.ledger import Group
from orchestrator.trajectory import Trajectory
from trainer import passes
from trainer.handle import TrainerHandle
from trainer.logprobs import chosen_logprobs
from trainer.shard import Shard
from trireme.config.orchestrator import OrchestratorConfig
from trireme.core.batch import StoredBatch, TokenBatch
from trireme.core.normalization import Normalization
from trireme.core.prefixes import Forest
from trireme.core.types import Minibatch
from trireme.train.kl_penalty import KlPenalty

LORA = {"rank": 4, "alpha": 8.0, "seed": 5}


class InProcess(TrainerHandle):
    """A handle of one shard in this process. `computed` has the tokens of each pass of its models since they were last
    checked."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard._config, [None], [None], None)
        self.shard = shard
        self.computed: list[int] = []
        for model in filter(None, (shard._model, shard._reference)):
            model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, _: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        self.computed.append(args[0].numel())

    def _call(self, verb: Any, *args: Any) -> list[Any]:
        return [getattr(self.shard, verb)(*args)]

    def _call_with(self, batch: StoredBatch, verb: Any, *args: Any) -> list[Any]:
        return self._call(verb, batch.parts_R[0].opened(self._fetch), *args)

    def _fetch(self, reference: Any, owner: str) -> Any:
        return reference


@pytest.fixture
def trainer(shard):
    """Returns a function that makes a handle of a fresh shard, in place of the one before."""

    def make(share: str, **options: Any) -> InProcess:
        return InProcess(shard(trainer={"share_prefixes": share, **options}))

    return make


def check_computed(trainer: InProcess, forest: Forest, share: str) -> None:
    """Checks that the models have computed the distinct tokens of the forest since the last check, or each sequence
    whole."""
    computed = sum(trainer.computed)
    trainer.computed.clear()
    if share == "on":
        assert computed == (forest.lengths - forest.shared).sum() < 0.7 * forest.lengths.sum()
    else:
        assert computed >= forest.lengths.sum()


def make_groups() -> tuple[TokenBatch, Forest]:
    """Returns the datums of two groups with the same tokens, of which each shares its own, and their forest."""
    batches = [make_forest(seed) for seed in (0, 0)]
    tokens_N = [np.split(batch.tokens, batch.offsets[1:-1]) for batch in batches]
    return TokenBatch.join(batches), Forest.find_in_groups(tokens_N)


@pytest.mark.parametrize("kind", ["other weights", "the base", "earlier adapters"])
def test_the_penalty_is_that_of_whole_sequences(trainer, tmp_path, kind):
    other = make_model(tmp_path / "reference", "qwen3", True, initializer_range=0.3)
    reference = {"base_model": other if kind == "other weights" else None}
    if kind == "earlier adapters":
        reference["update_every"] = 3
    batch, forest = make_groups()
    results = []
    for share in ("on", "off"):
        one = trainer(share, kl={"coef": 0.1, "reference": reference}, lora=LORA if kind != "other weights" else {})
        if kind != "other weights":
            fill(one.shard, 1)
        if kind == "earlier adapters":
            one.update_reference()
            fill(one.shard, 2)
        stored = StoredBatch.store(forest, batch.sequences, batch.take, one.shard.rank_assignment())
        penalty = KlPenalty(one, 0.1, 0.5)
        names = ("problem",) * len(batch)
        one.computed.clear()
        (penalized,) = penalty(iter([Minibatch(stored, None, names, True, 2, 1.0)]))
        check_computed(one, forest, share)
        advantages = penalized.batch.whole(one._fetch).columns["advantages"]
        results.append((penalty.take()["kl_policy_base"], advantages, one.forward(batch, "reference").logprobs))
        assert np.abs(results[-1][2] - one.forward(batch).logprobs).max() > 1e-3
    for shared, flat in zip(*results, strict=True):
        np.testing.assert_allclose(shared, flat, atol=1e-5)
    assert np.abs(results[0][1] - batch.columns["advantages"]).max() > 1e-3


def test_sequences_in_several_datums_have_the_ratios_of_whole_sequences(trainer):
    batch, forest = make_groups()
    results = []
    for share in ("on", "off"):
        one = trainer(share)
        stored = StoredBatch.store(forest, np.arange(len(batch)) // 2, batch.take, one.shard.rank_assignment())
        output = one.forward_backward(stored, "gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9})
        if share == "on":
            assert one.computed == [(forest.lengths - forest.shared).sum()] * 2
        results.append((output.metrics, gradients_of(one.shard)))
    (metrics, gradients), (flat_metrics, flat_gradients) = results
    assert metrics == pytest.approx(flat_metrics, rel=1e-5)
    check_same_gradients(gradients, flat_gradients)


@pytest.mark.parametrize("packing", ["rows", "packed"])
def test_a_target_counts_if_its_weight_is_negative_and_is_left_out_if_it_is_0(trainer, monkeypatch, packing):
    """As in a loss of the user's own, of which both signs come. Nobody reads the log-probabilities of a stored
    batch."""
    batch, forest = make_groups()
    columns = {"target_tokens": batch.columns["target_tokens"], "weights": batch.columns["advantages"]}
    batch = replace(batch, columns=columns)
    counted = np.count_nonzero(columns["weights"])
    assert 0 < counted < len(batch.tokens)
    targets: list[int] = []

    def counting(model: Any, tokens: Any, chosen: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        targets.append(len(chosen))
        return chosen_logprobs(model, tokens, chosen, *args, **options)

    monkeypatch.setattr(passes, "chosen_logprobs", counting)
    results = []
    for share in ("on", "off"):
        one = trainer(share, packing=packing)
        stored = StoredBatch.store(forest, batch.sequences, batch.take, one.shard.rank_assignment())
        output = one.forward_backward(stored, "cross_entropy")
        check_computed(one, forest, share)
        assert sum(targets) == counted == output.metrics["loss_tokens:sum"]
        targets.clear()
        results.append((output.metrics, gradients_of(one.shard)))
    (metrics, gradients), (flat_metrics, flat_gradients) = results
    assert metrics == pytest.approx(flat_metrics, rel=1e-5)
    check_same_gradients(gradients, flat_gradients)
    assert columns["weights"].min() < 0 < columns["weights"].max()


async def play_sessions() -> tuple[Trajectory, ...]:
    """Returns the trajectories of two sessions of an agent, as the service records them. In each a question is
    followed by two answers at once, one of them is continued, and then another way is tried."""
    question = user("How much is the area of a garden of 3 by 4?")

    async def play(client: openai.AsyncOpenAI) -> float:
        first = await ask(client, question)
        best = await ask(client, question, first, user("best of"), n=2)
        await ask(client, question, first, user("best of"), best[1], user("check it"))
        await ask(client, question, first, user("go back"))
        return 1.0

    async with rollout(*(f"text {n}" for n in range(10))) as run:
        return (await run.play(play), await run.play(play))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_turns_and_branches_of_recorded_sessions_are_trained_as_whole_sequences(shard, tmp_path, kind):
    trajectories = asyncio.run(play_sessions())
    assert [(len(one.turns), one.num_segments) for one in trajectories] == [(5, 3)] * 2
    scored = ScoredGroup(Group(0, "agent", floor=VERSION), trajectories, (1.0, 0.0), ({}, {}), (), 0.7)
    model = make_model(tmp_path / "model", kind, True, vocab_size=len(bpe(QWEN3)), max_position_embeddings=512)
    results = []
    for share in ("on", "off"):
        one = InProcess(shard(model, trainer={"share_prefixes": share}))
        keep = partial(StoredBatch.store, assign=one.shard.rank_assignment())
        options = OrchestratorConfig(batch_size=1)
        batch = build_minibatch(VERSION, [scored], options, Normalization("token_mean", None), True, keep).batch
        logprobs = one.forward(batch).logprobs
        check_computed(one, batch.forest, share)
        output = one.forward_backward(batch, "importance_sampling")
        check_computed(one, batch.forest, share)
        assert output.metrics["loss_tokens:sum"] == sum(turn.sampled for one in trajectories for turn in one.turns)
        results.append((logprobs, output.metrics, gradients_of(one.shard)))
    (logprobs, metrics, gradients), (flat_logprobs, flat_metrics, flat_gradients) = results
    np.testing.assert_allclose(logprobs, flat_logprobs, atol=1e-5)
    assert metrics == pytest.approx(flat_metrics, rel=1e-5)
    check_same_gradients(gradients, flat_gradients)
