"""Runs whose weights travel through the object store or by broadcast, most of them as changes: a replica is lost while
it takes them, or refuses them.

All of it is `long`. The codec, and 200 updates of replicas that join, miss versions and refuse changes:
unit/transports/test_delta.py.
"""

import os
from pathlib import Path

import pytest
import torch
from chaos_support import armed
from resume_support import rows_of
from run_support import ROOT, Ended, assert_bound_and_conservation, run_rl
from transformers import AutoTokenizer, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from trireme.core.errors import EXIT_OK

STEPS = 5
FLAGS = [
    *("--inference.encoding", "delta", "--model.dtype", "bfloat16", "--trainer.learning-rate", "1e-6"),
    *("--trainer.shards", "2", "--inference.replicas", "2", "--orchestrator.max-steps-off-policy", "0"),
    *("--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--max-steps", str(STEPS)),
]


POINTS = {
    ("object_store", "delta"): ("update", "write", "load"),
    ("object_store", "dense"): ("update", "load"),
    ("broadcast", "delta"): ("write", "load"),
}


@pytest.mark.long
@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(
    ("transport", "encoding", "point"), [(*way, point) for way, points in POINTS.items() for point in points]
)
def test_a_replica_that_is_lost_in_the_middle_costs_the_run_nothing_else(
    tmp_path: Path, transport: str, encoding: str, point: str, action: str
) -> None:
    """Every version has one bucket, so it is the third version. The other replica takes changes all along."""
    fault = f"inference.{point}[1]@3={action}"
    way = ("--inference.transport", transport, "--inference.encoding", encoding)
    flags = [*FLAGS, *way, "--timeouts.update-s", "20"]
    outcome = run_rl(tmp_path, *flags, environ=armed(tmp_path, [fault]))
    assert os.listdir(tmp_path / "once") == [fault], outcome.out
    assert outcome.code == EXIT_OK, outcome.out
    assert {row["attempt"] for row in outcome.rows} == {1}, "the trainer has seen nothing of it"
    assert len({row["weights/digest"] for row in outcome.rows}) == STEPS
    assert {incident["part"] for incident in rows_of(outcome.root / "incidents.jsonl")} <= {"inference_1"}
    assert_bound_and_conservation(outcome, bound=0)
    outcome.assert_nothing_left()


def assert_changes_arrive(outcome: Ended) -> None:
    """The first version travels whole, the others as changes; each is proved by its digest and its canary."""
    assert outcome.code == EXIT_OK, outcome.out
    whole = outcome.rows[0]["weights/bytes"] / 1e6
    shares = [row["perf/weights_received_mb"] / whole for row in outcome.rows]
    assert [share > 0.5 for share in shares] == [True, False, False, False, False], shares
    assert [row["perf/weights_refused"] for row in outcome.rows] == [0] * STEPS
    assert not (outcome.root / "incidents.jsonl").exists() or not rows_of(outcome.root / "incidents.jsonl")
    outcome.assert_nothing_left()


def digests(outcome: Ended) -> set[str]:
    return {row["weights/digest"] for row in outcome.rows}


@pytest.mark.long
def test_changes_reach_all_ranks_of_an_engine(tmp_path: Path) -> None:
    outcome = run_rl(tmp_path, *FLAGS, "--inference.replicas", "1", "--inference.tensor-parallel", "2")
    assert_changes_arrive(outcome)
    assert len(digests(outcome)) == STEPS


@pytest.mark.long
def test_changes_reach_experts(tmp_path: Path) -> None:
    """vLLM packs the experts of a layer into two tensors; the trainer publishes three for each expert."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "sort-base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    special = {"vocab_size": 99, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **special))
    model.save_pretrained(tmp_path / "experts")
    tokenizer.save_pretrained(tmp_path / "experts")
    outcome = run_rl(tmp_path, *FLAGS, "--model.name", str(tmp_path / "experts"))
    assert_changes_arrive(outcome)
    assert len(digests(outcome)) > 1, "a step changes nothing where all answers of the random model are as bad"


@pytest.mark.long
def test_changes_reach_adapters(tmp_path: Path) -> None:
    """A step changes most values of the matrices B. Here they are a ninth of the adapter: the model is sort-base with
    four times the inner width of its feed-forward layers, and zeros there."""
    base = Qwen3ForCausalLM.from_pretrained(ROOT / "assets" / "sort-base")
    inner = base.config.intermediate_size
    base.config.intermediate_size = 4 * inner
    model = Qwen3ForCausalLM(base.config)
    wide = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    for name, tensor in base.state_dict().items():
        wide[name][tuple(map(slice, tensor.shape))] = tensor
    model.load_state_dict(wide)
    model.save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(ROOT / "assets" / "sort-base").save_pretrained(tmp_path / "wide")
    lora = ("--trainer.lora.rank", "8", "--trainer.lora.targets", '["down_proj"]')
    outcome = run_rl(tmp_path, *FLAGS, *lora, "--model.name", str(tmp_path / "wide"))
    assert_changes_arrive(outcome)
    assert len(digests(outcome)) == STEPS
