"""The callers of the trainer's handle with shared prefixes: the KL penalty, `sft`, Tinker, losses of the user's own and
sessions of agents compute what they compute with each sequence whole."""

import asyncio
import time
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
from sft_support import config as sft_config
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

# The tiny models are the end-to-end tests' too.
from trainer_support import VOCAB, make_model

from orchestrator.advantages import ScoredGroup, build_minibatch
from orchestrator.ledger import Group
from orchestrator.trajectory import Trajectory
from service.tinker.bodies import CreateModelBody
from service.tinker.catalog import Catalog
from service.tinker.codec import ForwardBackwardCall
from service.tinker.owners import SERVER
from service.tinker.promises import Success
from service.tinker.work import TrainingWorker
from trainer import passes
from trainer.handle import TrainerHandle
from trainer.logprobs import chosen_logprobs
from trainer.shard import Shard
from trireme.config.losses import LOSSES
from trireme.config.orchestrator import OrchestratorConfig
from trireme.core.batch import StoredBatch, TokenBatch
from trireme.core.normalization import Normalization
from trireme.core.prefixes import Forest
from trireme.core.types import Minibatch
from trireme.process.signals import Stop
from trireme.sft.data import Examples
from trireme.sft.reading import Example
from trireme.supervision.roster import Roster
from trireme.train.guards import RefusedSteps
from trireme.train.kl_penalty import KlPenalty
from trireme.train.sft_loop import evaluate, train_step
from trireme.train.steps import Attempt, StepRecord

LORA = {"rank": 4, "alpha": 8.0, "seed": 5}
STEM = 20
ONE = "s:train:1"


class InProcess(TrainerHandle):
    """A handle of one shard in this process. `computed` has the tokens of each pass of its models since they were last
    checked; `gradients` are those of the last update."""

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

    def optim_step(self, *args: Any) -> Any:
        self.gradients = [parameter.grad.to_local().clone() for parameter in self.shard._parameters]
        return super().optim_step(*args)


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


def examples() -> Examples:
    """Returns conversations with three beginnings, with weights that are not all 0 or 1."""
    rng = np.random.default_rng(0)
    stems = rng.integers(0, VOCAB, (3, STEM)).tolist()
    tokens_N = [stems[n % 3] + rng.integers(0, VOCAB, 5 + n).tolist() for n in range(9)]
    weights_N = [(rng.random(len(tokens)) * (rng.random(len(tokens)) < 0.8)).astype(np.float32) for tokens in tokens_N]
    rows = zip(tokens_N, weights_N, strict=True)
    return Examples.of([Example(np.asarray(tokens, np.int32), weights, "f:1") for tokens, weights in rows])


def test_supervised_steps_and_evaluations_are_those_of_whole_sequences(trainer):
    config = sft_config()
    data = examples()
    forest = data.batch(range(len(data))).find_forest()
    unused: Any = None
    attempt = Attempt(
        config, 1, 0, lambda _: 1e-3, unused, RefusedSteps(config, print), Stop(60.0), Roster(lambda: 0.0), unused
    )
    results = []
    for share in ("on", "off"):
        one = trainer(share)
        record = StepRecord(0)
        tested = evaluate(one, data, 0, record.clock)
        check_computed(one, forest, share)
        row = train_step(one, data, range(len(data)), attempt, record)
        check_computed(one, forest, share)
        saving = record.perf_metrics()["perf/prefix_saving"]
        if share == "on":
            assert saving == pytest.approx(forest.lengths.sum() / (forest.lengths - forest.shared).sum())
        else:
            assert saving == 1
        results.append((row | tested, one.gradients))
    (row, gradients), (flat_row, flat_gradients) = results
    assert row == pytest.approx(flat_row, rel=1e-5)
    check_same_gradients(gradients, flat_gradients)


def encoded(data: list[types.Datum], loss_fn: Any, *, forward_only: bool = False) -> ForwardBackwardCall:
    """Returns the request as the client sends it."""
    config = {"beta": 0.5} if loss_fn == "dro" else None
    request = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config),
        model_id=ONE,
        seq_id=1,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return ForwardBackwardCall.of(message.SerializeToString())


def client_datums(loss_fn: str) -> list[types.Datum]:
    """Returns datums of a client that share prefixes, with the columns of the loss."""
    batch = make_forest()
    data = []
    for d in range(len(batch)):
        columns = {name: column.data for name, column in batch.datum(d).loss_fn_inputs.items()}
        columns["weights"] = columns["advantages"]
        names = (
            ["target_tokens", "weights"] if loss_fn == "cross_entropy" else ["target_tokens", "logprobs", "advantages"]
        )
        inputs: Any = {name: types.TensorData.from_numpy(columns[name]) for name in names}
        tokens = batch.datum(d).model_input.to_ints()
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return data


def run(worker: TrainingWorker, model_id: str, work: Any) -> Any:
    outcome, _ = worker.run(model_id, work, SERVER)
    assert isinstance(outcome, Success), outcome
    return outcome.payload


def logprobs_of(payload: bytes) -> list[float]:
    """Returns the log-probabilities of all datums as the client reads them."""
    output = deserialize_forward_backward_output(payload)
    return [number for datum in output.loss_fn_outputs for number in datum["logprobs"].data]


@pytest.fixture
def worker(tmp_path):
    """Returns a function that makes the worker of a Tinker server on this handle, with these models."""

    def make(trainer: InProcess, names: tuple[str, ...]) -> TrainingWorker:
        directory = tmp_path / str(time.monotonic_ns())
        catalog = Catalog(directory / "runs", "base", time.time)
        made = TrainingWorker(
            trainer, catalog, ("base",), directory / "base", 10.0, 128, trainer.shard._config.trainer.lora
        )
        for name in names:
            body = CreateModelBody.model_validate(
                {"session_id": "s", "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": LORA["rank"]}}
            )
            run(made, name, body)
            fill(trainer.shard, int(name[-1]))
        return made

    return make


def test_the_passes_of_a_client_are_those_of_whole_sequences(trainer, worker):
    forest = make_forest().find_forest()
    results = []
    for share in ("on", "off"):
        one = trainer(share, lora=LORA)
        made = worker(one, (ONE,))
        outputs = {}
        for loss_fn in LOSSES:
            payload = run(made, ONE, encoded(client_datums(loss_fn), loss_fn))
            check_computed(one, forest, share)
            outputs[loss_fn] = payload, gradients_of(one.shard)
        payload = run(made, ONE, encoded(client_datums("cross_entropy"), "cross_entropy", forward_only=True))
        check_computed(one, forest, share)
        outputs["forward"] = payload, []
        results.append(outputs)
    for name, (payload, gradients) in results[0].items():
        flat_payload, flat_gradients = results[1][name]
        np.testing.assert_allclose(logprobs_of(payload), logprobs_of(flat_payload), atol=1e-5)
        metrics = deserialize_forward_backward_output(payload).metrics
        flat_metrics = deserialize_forward_backward_output(flat_payload).metrics
        assert metrics == pytest.approx(flat_metrics, rel=1e-5, abs=1e-5)
        if gradients:
            check_same_gradients(gradients, flat_gradients)
