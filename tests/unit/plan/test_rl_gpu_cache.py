"""The KV cache of a replica on a GPU: no more than its engine can use. The rest is left to the trainer."""

from pathlib import Path
from typing import Any

import pytest
from plan_support import inference, machines, trainer
from vllm.v1.core.block_pool import BlockPool

from trireme.config import installed
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.plan.base import Plan
from trireme.plan.memory import GIB, gpu_room
from trireme.plan.rl import BLOCK_TOKENS, ENGINE_BYTES, RL_ROOMS

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
LARGE = machines(gpus=1, gpu_bytes=140 * GIB)


@pytest.fixture(autouse=True)
def _gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")


def quickstart(*flags: str) -> tuple[Plan, ModelFacts]:
    """Returns the plan of the quickstart on one GPU of 140 GiB, and the sizes of its model."""
    options = ["--cluster.device", "gpu", "--trainer.shards", "1", "--inference.gpu-memory-utilization", "0.4"]
    config = load(["@", str(QUICKSTART), *options, *flags], {}).config
    facts = ModelFacts.of(config, required=True)
    assert facts is not None
    return Plan(config, facts, LARGE, RL_ROOMS), facts


def blocks(given: Plan, facts: ModelFacts) -> int:
    """Returns the number of blocks that the engine makes of the cache."""
    cache = given.resolved(given.config).inference.gpu_cache_gb  # type: ignore[attr-defined]
    return int(int(cache * GIB) // (BLOCK_TOKENS * facts.kv_values_per_token * 2))


def test_the_quickstart_on_a_large_gpu_gets_few_blocks() -> None:
    """1,024 sequences of 32 tokens, and as much again; the whole share of the GPU would be seven million blocks."""
    given, facts = quickstart()
    assert blocks(given, facts) == 2 * 1024 * 32 // BLOCK_TOKENS <= 8192
    left = inference(given)._cache_left // (BLOCK_TOKENS * facts.kv_values_per_token * 2)
    assert left > 6_000_000
    text = dict(row for part in given.parts for row in part.rows("a GPU"))["memory"]
    assert "instead of 40%" in text
    assert "what 1,024 sequences of full length take, and 1 times that" in text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--inference.prefix-cache", "0"], 1024 * 2),
        (["--inference.prefix-cache", "2.5"], 3.5 * 1024 * 2),
        (["--inference.max-num-seqs", "100"], 2 * 100 * 2),
        (["--inference.max-model-len", "40"], 2 * 1024 * 3),
    ],
)
def test_the_keys_that_decide(flags: list[str], expected: float) -> None:
    assert blocks(*quickstart(*flags)) == expected


def test_the_rest_is_left_to_the_trainer() -> None:
    given, facts = quickstart()
    taken = (
        ENGINE_BYTES + 2 * facts.num_parameters + blocks(given, facts) * BLOCK_TOKENS * facts.kv_values_per_token * 2
    )
    resolved = given.resolved(given.config)
    share = resolved.inference.gpu_memory_utilization  # type: ignore[attr-defined]
    assert taken <= share * 140 * GIB <= taken + 0.002 * 140 * GIB
    assert given.shares_gpu
    assert trainer(given)._room == gpu_room(140 * GIB, 140 * GIB, share)


class CountingBlock:
    resets = 0

    def reset_hash(self) -> None:
        self.resets += 1


class Blocks:
    """A list of one block many times, without the memory of such a list."""

    def __init__(self, block: CountingBlock, count: int) -> None:
        self._block, self._count = block, count

    def __iter__(self) -> Any:
        return (self._block for _ in range(self._count))


@pytest.mark.parametrize("whole_share", [True, False])
def test_an_update_looks_at_each_block_of_the_pool(whole_share: bool) -> None:
    """`BlockPool.reset_prefix_cache`, which runs within the pause of each update, is a Python loop over all blocks."""
    given, facts = quickstart()
    left = inference(given)._cache_left // (BLOCK_TOKENS * facts.kv_values_per_token * 2)
    count = left if whole_share else blocks(given, facts)
    pool = BlockPool(num_gpu_blocks=2, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    block = CountingBlock()
    pool.blocks = Blocks(block, count)  # type: ignore[assignment]
    assert pool.reset_prefix_cache()
    assert block.resets == count
    assert (count > 6_000_000) is whole_share
