"""Thousands of rollouts of 50 turns to 32k tokens: sampled, laid out, fetched by shards, committed and resumed.

    python scripts/bench/long_rollouts.py [--rollouts 2048] [--shards 4]

The orchestrator is that of a run, an actor that a driver calls; its replicas have their answers ready (`turns.py`,
`_ready_replicas.py`), so that all its time is its own. The shards are actors without a model, which fetch what a shard
computes. A second orchestrator resumes from the commit of the first, and lays out
the same batch again, token for token.

The last lines of the output are the results, a JSON object each:

    memory   bytes of a rollout in the orchestrator's process once all are sampled, and in the commit, the larger of the
             two over 14 bytes for each of its distinct tokens (a token, its log-probability, its version, two marks)
    stall    the longest time that the orchestrator's event loop stood still from the last answer on, while the batch is
             laid out, given away and committed: by the clock, and CPU seconds of the loop's thread meanwhile
    whole    seconds of all of it, with those of each part, and CPU seconds of all processes
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from _common import Result, cpu_by_room
from _ready_replicas import ReadySampler
from _rooms import let_actors_import_benchmarks
from pipeline import START_S, published
from turns import GROUP_SIZE, LONG, config_of, make_model

from trireme.core.batch import TokenBatch
from trireme.process.environ import prepare_ray_environment

if TYPE_CHECKING:
    from orchestrator.handle import OrchestratorHandle
    from trainer.batching import ShardOutput
    from trainer.handle import TrainerHandle
    from trireme.config import Config
    from trireme.core.batch import Assign, StoredBatch, StoredPart

BYTES_PER_TOKEN = 14
TARGET_MEMORY = 1.5
TARGET_STALL_S = 0.1
TARGET_WHOLE_S = 600.0


class StubShard:
    """A shard without a model: fetches its part of a batch, and returns a log-probability for each token."""

    def __init__(self, rank: int, assign: Assign) -> None:
        self._rank, self._assign = rank, assign

    def call(self, verb: str, part: StoredPart, *_: Any) -> ShardOutput:
        """Fetches the part as a shard's actor does; the log-probabilities stay here, as with a shard."""
        from trainer.batching import ShardOutput

        opened = part.opened(lambda reference, owner: wait_for([reference], owner)[0])
        datums = self._assign(opened.lengths)[self._rank]
        assert len(opened.batch.tokens) >= opened.lengths[datums].sum(), "its part has all that it computes"
        return ShardOutput(tuple(datums.tolist()), np.zeros(0, np.float32), {"loss:sum": 0.0})

    def ready(self) -> int:
        """Returns its process id."""
        return os.getpid()

    def peak(self) -> int:
        """Returns the most bytes that it had in memory."""
        return peak_bytes()


def peak_bytes() -> int:
    """Returns the most bytes that this process had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Parts:
    """Seconds by the clock, and CPU seconds of all processes, of each part."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        cpu_before, started = _cpu_s(), time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 3)
        self.cpu_s[name] = round(_cpu_s() - cpu_before, 3)


def wait_for(refs: Sequence[Any], who: str) -> list[Any]:
    """Returns the answers of several actors."""
    from trireme.process import waits  # imports Ray, which reads its environment then

    answers: list[Any] = waits.get_all(refs, who=[who] * len(refs), timeout_s=START_S)
    return answers


def _cpu_s() -> float:
    return sum(sum(seconds) for seconds in cpu_by_room(psutil.Process()).values())


def start_orchestrator(config: Config, notes: Path, assign: Assign) -> OrchestratorHandle:
    from orchestrator.handle import OrchestratorHandle

    sampler: Any = partial(ReadySampler, notes)  # it has no replicas that join or fail
    handle = OrchestratorHandle.start(config, sampler, {"num_cpus": 0}, None, assign=assign)
    wait_for(handle.ready_refs()[0], "the orchestrator")
    return handle


def start_trainer(config: Config, shards: int, assign: Assign) -> tuple[TrainerHandle, list[Any]]:
    import ray

    from trainer.handle import TrainerHandle

    actors = [ray.remote(StubShard).options(num_cpus=0).remote(rank, assign) for rank in range(shards)]
    ready = [actor.ready.remote() for actor in actors]
    wait_for(ready, "a stub shard")
    return TrainerHandle(config, actors, ready, None), actors


def take(orchestrator: OrchestratorHandle, trainer: TrainerHandle, parts: Parts, name: str) -> StoredBatch:
    """Brings weights, and takes and trains the first step. Returns its batch, which is in the object store."""
    orchestrator.update_weights(published(0))
    with parts(f"{name}: sampled and laid out"):
        (minibatch,) = orchestrator.minibatches(0, 0)
    with parts(f"{name}: fetched by the shards"):
        trainer.forward_backward(minibatch.batch, "ppo", None, minibatch.provenance)
    batch = minibatch.batch
    assert not isinstance(batch, TokenBatch), "the orchestrator stores what it lays out"
    return batch


def whole(batch: StoredBatch) -> TokenBatch:
    """Fetches all parts of a batch."""
    return batch.whole(lambda reference, owner: wait_for([reference], owner)[0])


def notes_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def equal(one: TokenBatch, other: TokenBatch) -> bool:
    """Tells whether two batches are the same, bit for bit."""
    return np.array_equal(one.tokens, other.tokens) and all(
        np.array_equal(column.view(np.int32), other.columns[name].view(np.int32))
        for name, column in one.columns.items()
    )


def run(directory: Path, rollouts: int, shards: int) -> None:
    from trainer.batching import RankAssignment
    from trireme.config import Config

    groups = rollouts // GROUP_SIZE
    shape = config_of(make_model(directory / "model"), LONG, groups, 2, max_steps_off_policy=0)
    config, parts = Config.model_validate(shape), Parts()
    assign = RankAssignment(shards, 1)
    trainer, actors = start_trainer(config, shards, assign)
    notes = directory / "notes.jsonl"
    orchestrator = start_orchestrator(config, notes, assign)
    batch = take(orchestrator, trainer, parts, "new")
    with parts("committed"):
        files = orchestrator.save_state(directory / "commit").wait(config.timeouts.checkpoint_s)
    driver_peak = peak_bytes()
    there = whole(batch)
    orchestrator.stop()
    noted = notes_of(notes)
    orchestrator = start_orchestrator(config, directory / "resumed.jsonl", assign)
    with parts("resumed: read"):
        orchestrator.load_state(directory / "commit")
    again = take(orchestrator, trainer, parts, "resumed")
    if not equal(there, whole(again)):
        raise RuntimeError("the batch of the resumed orchestrator differs from that of the first")
    orchestrator.stop()
    print_memory(noted, sum(file.stat().st_size for file in (directory / "commit").iterdir()), rollouts)
    print_stall(noted, notes_of(directory / "resumed.jsonl"), len(there.tokens))
    peaks = wait_for([actor.peak.remote() for actor in actors], "a stub shard")
    print_whole(parts, len(there.tokens), driver_peak, peaks, files)


def print_memory(noted: Sequence[dict[str, Any]], commit_bytes: int, rollouts: int) -> None:
    first, done = noted[0], [note for note in noted if note["what"] == "answered"][-1]
    of_tokens = BYTES_PER_TOKEN * LONG.context
    process, commit = (done["rss"] - first["rss"]) / rollouts, commit_bytes / rollouts
    Result(
        name="long_rollouts, memory",
        value=round(max(process, commit) / 1e6, 4),
        unit="MB of a rollout of 50 turns and 32k tokens",
        ratio=round(max(process, commit) / of_tokens, 3),
        target=TARGET_MEMORY,
        holds=max(process, commit) <= TARGET_MEMORY * of_tokens,
        against=f"{BYTES_PER_TOKEN} bytes for each of {LONG.context} distinct tokens",
        detail={
            "process_mb": round(process / 1e6, 4),
            "process_ratio": round(process / of_tokens, 3),
            "commit_mb": round(commit / 1e6, 4),
            "commit_ratio": round(commit / of_tokens, 3),
            "rollouts": rollouts,
        },
    ).print()


def print_stall(first: Sequence[dict[str, Any]], resumed: Sequence[dict[str, Any]], tokens: int) -> None:
    """Gaps from the last answer on count; those while rollouts are sampled are said."""
    end = [note["at"] for note in first if note["what"] == "answered"][-1]
    gaps = [note for note in first if note["what"] == "gap"]
    building = [g for g in gaps if g["at"] > end] + [note for note in resumed if note["what"] == "gap"]
    sampling = [g for g in gaps if g["at"] <= end]
    worst = max((gap["gap_s"] for gap in building), default=0.0)
    worst_cpu = max((gap["gap_cpu_s"] for gap in building), default=0.0)
    Result(
        name="long_rollouts, stall",
        value=round(worst, 4),
        unit=f"s, the longest stall of the event loop while a batch of {tokens} tokens is built and committed",
        ratio=round(worst / TARGET_STALL_S, 3),
        target=1.0,
        holds=worst <= TARGET_STALL_S,
        against=f"{TARGET_STALL_S} s",
        detail={
            "cpu_s_of_the_loops_thread": round(worst_cpu, 4),
            "longest": [round(g["gap_s"], 3) for g in sorted(building, key=lambda g: -g["gap_s"])[:8]],
            "sampling_s": round(max((gap["gap_s"] for gap in sampling), default=0.0), 4),
            "sampling_cpu_s": round(max((gap["gap_cpu_s"] for gap in sampling), default=0.0), 4),
            "load": os.getloadavg()[0],
        },
    ).print()


def print_whole(parts: Parts, tokens: int, driver_peak: int, peaks: Sequence[int], files: Sequence[Any]) -> None:
    whole = sum(parts.seconds.values())
    Result(
        name="long_rollouts, whole",
        value=round(whole, 2),
        unit=f"s for {tokens} tokens",
        ratio=round(whole / TARGET_WHOLE_S, 3),
        target=1.0,
        holds=whole <= TARGET_WHOLE_S,
        against=f"{TARGET_WHOLE_S:g} s",
        detail={
            "seconds": parts.seconds,
            "cpu_s": parts.cpu_s,
            "driver_peak_gb": round(driver_peak / 1e9, 3),
            "shard_peak_gb": [round(peak / 1e9, 3) for peak in peaks],
            "files": len(files),
            "load": os.getloadavg()[0],
        },
    ).print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2048, help="of one step (default: 2048)")
    parser.add_argument("--shards", type=int, default=4, help="which fetch the batch (default: 4)")
    args = parser.parse_args()
    let_actors_import_benchmarks()
    prepare_ray_environment(None, threads=1, deterministic=False)
    import ray

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        try:
            run(Path(directory), args.rollouts, args.shards)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
