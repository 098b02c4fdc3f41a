"""What a commit costs the trainer: 100 million parameters with AdamW, sharded over two processes.

    python scripts/bench/checkpoint.py [--repeats 5] [--directory DIR]

Lost training time: ten steps (forward_backward, optim_step, publish_weights, as in a run) during which an asynchronous
commit is written, less ten without, over the time of the same commit when it is waited for. A run also waits for
batches, in which writing is free; here the trainer is never idle. Bytes per second of the commit that is waited for are
held against `dd conv=fsync` of as many bytes, in turn, in the same directory.

The two last lines of the output are the results, a JSON object each. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from _common import DEADLINE_S, Result, cpu_by_room, median

from trireme.environ import prepare_local_cluster

if TYPE_CHECKING:
    from trainer.group import TrainerGroup
    from trireme.weights import PublishedWeights

SHARDS = 2
STEPS = 10
TOKENS = 16
SEQUENCES = 4
VOCAB = 32_000
TARGET_LOST = 0.15
TARGET_RATE = 0.7


@dataclass
class Measured:
    """Seconds of each repeat; `committed_s`: until the asynchronous commit was on the disk; `blocking_cpu_s`: of the
    shards' processes while they do nothing but write. `nbytes` of one commit."""

    plain_s: list[float] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    committed_s: list[float] = field(default_factory=list)
    blocking_s: list[float] = field(default_factory=list)
    blocking_cpu_s: list[float] = field(default_factory=list)
    dd_s: list[float] = field(default_factory=list)
    nbytes: int = 0


def make_model(directory: Path) -> int:
    """Saves a random Qwen3 model of about 100 million parameters, and a tokenizer; the number of parameters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=640,
        intermediate_size=2304,
        num_hidden_layers=14,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"0": 0}, unk_token="0"))).save_pretrained(
        directory
    )
    return model.num_parameters()


@contextmanager
def trainer(model: Path, temp_dir: Path) -> Iterator[TrainerGroup]:
    """Two shards in a Ray cluster of their own, each with its share of the machine's cores."""
    import ray

    from trainer.group import TrainerGroup
    from trireme import waits
    from trireme.config import Config

    config = Config.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "inference": {"sampling": {"max_tokens": 8}},
        }
    )
    ray.init(
        address="local",
        num_cpus=SHARDS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=4 * 2**30,
        _temp_dir=str(temp_dir),
    )
    group = TrainerGroup.start(config, [{"num_cpus": 1}] * SHARDS, None)
    refs, names = group.ready_refs()
    waits.get_all(refs, who=names, timeout_s=DEADLINE_S)
    yield group
    group.stop()
    ray.shutdown()


class Run:
    """The trainer's part of a run's loop, and its commits."""

    def __init__(self, group: TrainerGroup, directory: Path) -> None:
        from trireme.types import Datum, ModelInput, TokenBatch

        self._group, self._directory = group, directory
        rng = np.random.default_rng(0)

        def datum() -> Datum:
            tokens = rng.integers(0, VOCAB, TOKENS)
            columns = {
                "mask": np.ones(TOKENS),
                "logprobs": np.full(TOKENS, -9.0),
                "advantages": rng.normal(size=TOKENS),
            }
            return Datum(ModelInput.from_ints(tokens.tolist()), {"target_tokens": tokens, **columns})

        self._batch = TokenBatch.from_datums([datum() for _ in range(SEQUENCES)])
        self._version = 0
        self._published: PublishedWeights = group.publish_weights(0)

    def steps(self, count: int) -> float:
        """Trains; wall seconds."""
        from trireme.types import AdamParams

        started = time.monotonic()
        for _ in range(count):
            self._group.forward_backward(self._batch, "importance_sampling", {})
            self._group.optim_step(AdamParams(learning_rate=1e-5), float(TOKENS * SEQUENCES))
            self._version += 1
            self._published = self._group.publish_weights(self._version)
        return time.monotonic() - started

    def commit(self) -> tuple[Path, Callable[[], int]]:
        """Begins a commit of the trainer's state and the weights; where, and what waits for it and counts its bytes."""
        path = self._directory / f"step_{self._version:06d}"
        pending = [
            self._group.save_state(path / "trainer"),
            self._group.save_weights(path / "inference", self._published),
        ]
        return path, lambda: sum(record.size for part in pending for record in part.wait(DEADLINE_S))


def dd(directory: Path, nbytes: int) -> float:
    """Wall seconds in which dd writes that many bytes into one file, and forces them onto the disk."""
    file = directory / "dd.bin"
    started = time.monotonic()
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=4M", f"count={nbytes}", "iflag=count_bytes", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    seconds = time.monotonic() - started
    file.unlink()
    return seconds


def shards_cpu_s() -> float:
    """CPU seconds of all shards until now."""
    return sum(cpu_by_room(psutil.Process())["trainer shard"])


def measure(run: Run, directory: Path, repeats: int) -> Measured:
    """One of each in turn, after one commit and some steps that warm up (buffers, page cache)."""
    from concurrent.futures import ThreadPoolExecutor

    measured = Measured()
    run.steps(2)
    path, finish = run.commit()
    measured.nbytes = finish()
    shutil.rmtree(path)
    for i in range(repeats):
        measured.plain_s.append(run.steps(STEPS))
        started = time.monotonic()
        path, finish = run.commit()
        with ThreadPoolExecutor(1) as waiting:
            committed = waiting.submit(lambda finish=finish: (finish(), time.monotonic())[1])
            measured.during_s.append(time.monotonic() - started + run.steps(STEPS))
            measured.committed_s.append(committed.result() - started)
        shutil.rmtree(path)
        started, cpu_before = time.monotonic(), shards_cpu_s()
        path, finish = run.commit()
        finish()
        measured.blocking_s.append(time.monotonic() - started)
        measured.blocking_cpu_s.append(shards_cpu_s() - cpu_before)
        shutil.rmtree(path)
        measured.dd_s.append(dd(directory, measured.nbytes))
        print(
            f"repeat {i}: {STEPS} steps {measured.plain_s[-1]:.2f} s, during a commit {measured.during_s[-1]:.2f} s "
            f"(on the disk after {measured.committed_s[-1]:.2f} s); commit waited for {measured.blocking_s[-1]:.2f} s "
            f"({measured.blocking_cpu_s[-1]:.2f} CPU s), dd {measured.dd_s[-1]:.2f} s",
            flush=True,
        )
    return measured


def results(measured: Measured, parameters: int, load_before: float) -> list[Result]:
    lost = median([d - p for d, p in zip(measured.during_s, measured.plain_s, strict=True)])
    blocking, written = median(measured.blocking_s), measured.nbytes / 2**20
    slower = median([b / d for b, d in zip(measured.blocking_s, measured.dd_s, strict=True)])
    detail = {
        "parameters": parameters,
        "shards": SHARDS,
        "steps": STEPS,
        "commit_mib": round(written, 1),
        "load_before": round(load_before, 2),
        **{name: [round(s, 3) for s in values] for name, values in vars(measured).items() if isinstance(values, list)},
    }
    lost_result = Result(
        name="checkpoint_lost_time",
        value=lost,
        unit=f"s of training lost over the {STEPS} steps after an asynchronous commit",
        ratio=round(lost / blocking, 3),
        target=TARGET_LOST,
        holds=lost / blocking <= TARGET_LOST,
        against="the same commit, waited for",
        detail=detail,
    )
    rate_result = Result(
        name="checkpoint_write_rate",
        value=round(written / blocking, 1),
        unit="MiB/s of a commit that is waited for",
        ratio=round(1 / slower, 3),
        target=TARGET_RATE,
        holds=1 / slower >= TARGET_RATE,
        against="dd conv=fsync of as many bytes into the same directory, in turn",
        detail={"dd_mib_per_s": round(written / median(measured.dd_s), 1)},
    )
    return [lost_result, rate_result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds of each (default: 5)")
    parser.add_argument("--directory", type=Path, help="where commits are written (default: the temporary directory)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: expected at least 1")

    prepare_local_cluster(max(1, (os.cpu_count() or 1) // SHARDS), deterministic=False)
    load_before = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=args.directory) as directory,
        tempfile.TemporaryDirectory(prefix="tr-") as temp_dir,
    ):
        root = Path(directory)
        parameters = make_model(root / "model")
        with trainer(root / "model", Path(temp_dir)) as group:
            measured = measure(Run(group, root), root, args.repeats)
    for result in results(measured, parameters, load_before):
        result.print()


if __name__ == "__main__":
    main()
