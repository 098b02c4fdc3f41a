"""Batches on their way from the orchestrator's actor to the trainer's shards, over Ray: the driver holds none of their
tokens, and each shard fetches its own part."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from orchestrator_support import NamedSampler, update
from trainer_support import make_config, make_model

from orchestrator.handle import OrchestratorHandle
from trainer.batching import RankAssignment
from trainer.handle import TrainerHandle
from trireme.config.model_facts import ModelFacts
from trireme.core.batch import StoredBatch, TokenBatch
from trireme.core.errors import RoomFailed
from trireme.core.types import AdamParams, Minibatch
from trireme.process import waits

pytestmark = pytest.mark.long  # each run of CI trains batches of this kind
SHARDS = 2
STAY = AdamParams(learning_rate=0.0)


def fetch(reference: Any, owner: str) -> Any:
    return waits.get(reference, owner=owner, timeout_s=30)


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory, ray_cluster: str) -> Iterator[tuple[TrainerHandle, Any]]:
    """Two shards, and an orchestrator that has answered with version 0 of the weights."""
    model = make_model(tmp_path_factory.mktemp("model"), "qwen3", True)
    config = make_config(
        model,
        trainer__shards=SHARDS,
        trainer__num_minibatches=1,
        trainer__micro_batch_tokens=8,
        orchestrator__batch_size=6,
        orchestrator__group_size=4,
        env={"id": "orchestrator_support:Guesses", "name": "guesses"},
    )
    facts = ModelFacts.of(config, required=True)
    assert facts is not None
    assign = RankAssignment(SHARDS, facts.attention_length, "auto")
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    importable = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    trainer = TrainerHandle.start(config, [{"num_cpus": 1}] * SHARDS, None)
    orchestrator = OrchestratorHandle.start(
        config, NamedSampler, {"num_cpus": 0, "runtime_env": importable}, None, assign=assign
    )
    started = [room.ready_refs() for room in (trainer, orchestrator)]
    refs, names = ([item for room in started for item in room[part]] for part in (0, 1))
    waits.get_all(refs, owners=names, timeout_s=240)
    update(orchestrator, 0)
    yield trainer, orchestrator
    trainer.stop()
    orchestrator.stop()


@pytest.fixture(scope="module")
def minibatch(rooms: tuple[TrainerHandle, OrchestratorHandle]) -> Minibatch:
    (minibatch,) = rooms[1].minibatches(0, 0)
    return minibatch


def test_each_shard_fetches_its_own_part_and_computes_what_it_does_with_the_whole(
    rooms: tuple[TrainerHandle, OrchestratorHandle], minibatch: Minibatch, tmp_path: Path
) -> None:
    trainer, batch = rooms[0], minibatch.batch
    assert isinstance(batch, StoredBatch)

    def note(part: TokenBatch) -> TokenBatch:  # runs where the part is, after it was fetched
        (tmp_path / str(os.getpid())).write_text(json.dumps(part.sequences.tolist()))
        return part

    output = trainer.forward_backward(batch.mapped(note), "ppo", {})
    assert not len(output.logprobs), "they stay with the shards"
    own_R = trainer._call("rank_assignment")[0](batch.forest)
    shortest = int(np.argmin(batch.lengths))
    expected = sorted(sorted({*indices.tolist(), shortest}) for indices in own_R)
    assert sorted(json.loads(file.read_text()) for file in tmp_path.iterdir()) == expected
    assert all(len(part) < len(batch) for part in expected)
    norm = trainer.optim_step(STAY, 1.0).metrics["grad_norm"]
    whole = batch.whole(fetch)
    again = trainer.forward_backward(whole, "ppo", {})
    assert again.metrics == output.metrics
    assert trainer.optim_step(STAY, 1.0).metrics["grad_norm"] == norm > 0, "bit for bit"
    assert whole.columns["mask"].sum() == output.metrics["loss_tokens:sum"]


def test_a_lost_part_is_a_lost_room(rooms: tuple[TrainerHandle, OrchestratorHandle], minibatch: Minibatch) -> None:
    trainer, orchestrator = rooms
    ray.kill(orchestrator._actor, no_restart=True)

    def train_until_it_fails(within_s: float) -> None:  # Ray takes a moment to drop what the dead process owned
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            trainer.forward_backward(minibatch.batch, "ppo", {})

    with pytest.raises(RoomFailed, match=r"orchestrator \(a part of a batch\): \w*(Owner|Lost)"):
        train_until_it_fails(60)
