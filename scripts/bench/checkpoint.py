"""Measures the cost of a checkpoint for the trainer: 100 million parameters with AdamW, sharded over two processes.

    python scripts/bench/checkpoint.py [--repeats 25] [--steps 2] [--directory DIR]

Lost training time: steps (forward_backward, optim_step, publish_weights, as in a run) during which an asynchronous
checkpoint is written, less the mean of as many before and after them, over the time of the same checkpoint when it is
waited for. The figure is the median of all rounds; their mean with its standard error is among the details. Checkpoints
that are waited for come now and then in between; the first step after one is slower, and is not timed.

The last line of the output is the result, a JSON object. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
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

from trireme.process.environ import prepare_ray_environment

if TYPE_CHECKING:
    from trainer.handle import TrainerHandle
    from trireme.core.weights import PublishedWeights

SHARDS = 2
TOKENS = 16
SEQUENCES = 4
VOCAB = 32_000
WAITED_FOR_EVERY = 5
TARGET_LOST = 0.15


@dataclass
class Measured:
    """Seconds of each repeat; `plain_s`: steps without a checkpoint, before and after that repeat; `saved_s`: until the
    asynchronous checkpoint was on the disk; `blocking_cpu_s`: of the shards' processes, while they do nothing but write
    one. `nbytes` of one checkpoint."""

    plain_s: list[tuple[float, float]] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    saved_s: list[float] = field(default_factory=list)
    blocking_s: list[float] = field(default_factory=list)
    blocking_cpu_s: list[float] = field(default_factory=list)
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
def trainer(model: Path, temp_dir: Path) -> Iterator[TrainerHandle]:
    """Two shards in a Ray cluster of their own, each with its share of the machine's cores."""
    import ray

    from trainer.handle import TrainerHandle
    from trireme.config import Config
    from trireme.process import waits

    config = Config.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "inference": {"sampling": {"max_tokens": 8}},
            "trainer": {"shards": SHARDS},
            "cluster": {"device": "cpu"},
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
    group = TrainerHandle.start(config, [{"num_cpus": 1}] * SHARDS, None)
    refs, names = group.ready_refs()
    waits.get_all(refs, owners=names, timeout_s=DEADLINE_S)
    yield group
    group.stop()
    ray.shutdown()


class Run:
    """The trainer's part of a run's loop, and its checkpoints."""

    def __init__(self, group: TrainerHandle, directory: Path) -> None:
        from trireme.core.types import Datum, ModelInput, TokenBatch

        self._group = group
        self._directory = directory
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
        from trireme.core.types import AdamParams

        started = time.monotonic()
        for _ in range(count):
            self._group.forward_backward(self._batch, "importance_sampling", {})
            self._group.optim_step(AdamParams(learning_rate=1e-5), float(TOKENS * SEQUENCES))
            self._version += 1
            self._published = self._group.publish_weights(self._version)
        return time.monotonic() - started

    def checkpoint(self) -> tuple[Path, Callable[[], int]]:
        """Begins a checkpoint of the trainer's state and the weights; where, and what waits for it and counts its
        bytes."""
        path = self._directory / f"step_{self._version:06d}"
        pending = [
            self._group.save_state(path / "trainer"),
            self._group.save_weights(path / "inference", self._published),
        ]
        return path, lambda: sum(record.size for part in pending for record in part.wait(DEADLINE_S))


def shards_cpu_s() -> float:
    """CPU seconds of all shards until now."""
    return sum(cpu_by_room(psutil.Process())["trainer shard"])


def measure_steps_during_a_checkpoint(run: Run, steps: int, measured: Measured) -> None:
    from concurrent.futures import ThreadPoolExecutor

    started = time.monotonic()
    path, finish = run.checkpoint()
    with ThreadPoolExecutor(1) as waiting:
        saved = waiting.submit(lambda: (finish(), time.monotonic())[1])
        run.steps(steps)
        measured.during_s.append(time.monotonic() - started)
        measured.saved_s.append(saved.result() - started)
    shutil.rmtree(path)
    if measured.saved_s[-1] > measured.during_s[-1]:
        raise RuntimeError(
            f"the checkpoint was on the disk after {measured.saved_s[-1]:.1f} s, but the {steps} steps that are timed "
            f"took only {measured.during_s[-1]:.1f} s, so more may be lost than was seen; time more of them: --steps"
        )


def measure_a_checkpoint(run: Run, measured: Measured) -> None:
    """One that is waited for."""
    started = time.monotonic()
    cpu_before = shards_cpu_s()
    path, finish = run.checkpoint()
    measured.nbytes = finish()
    measured.blocking_s.append(time.monotonic() - started)
    measured.blocking_cpu_s.append(shards_cpu_s() - cpu_before)
    shutil.rmtree(path)


def measure(run: Run, repeats: int, steps: int) -> Measured:
    """After a checkpoint and some steps that warm up (buffers, page cache)."""
    run.steps(2)
    measure_a_checkpoint(run, Measured())
    measured = Measured()
    before = 0.0
    for i in range(repeats):
        if i % WAITED_FOR_EVERY == 0:
            measure_a_checkpoint(run, measured)
            print(f"a checkpoint waited for {measured.blocking_s[-1]:.2f} s ({measured.blocking_cpu_s[-1]:.2f} CPU s)")
            run.steps(1)
            before = run.steps(steps)
        measure_steps_during_a_checkpoint(run, steps, measured)
        after = run.steps(steps)
        measured.plain_s.append((before, after))
        print(
            f"repeat {i}: {steps} steps {before:.2f} s, {after:.2f} s, during a checkpoint "
            f"{measured.during_s[-1]:.2f} s (on the disk after {measured.saved_s[-1]:.2f} s)",
            flush=True,
        )
        before = after
    return measured


def result(measured: Measured, parameters: int, steps: int, load_before: float) -> Result:
    plain_s = [statistics.mean(both) for both in measured.plain_s]
    lost_each = [during - plain for during, plain in zip(measured.during_s, plain_s, strict=True)]
    lost = median(lost_each)
    blocking = median(measured.blocking_s)
    written = measured.nbytes / 2**20
    error = statistics.stdev(lost_each) / math.sqrt(len(lost_each))
    detail = {
        "parameters": parameters,
        "shards": SHARDS,
        "steps": steps,
        "commit_mib": round(written, 1),
        "load_before": round(load_before, 2),
        "ratio_of_mean": round(statistics.mean(lost_each) / blocking, 3),
        "standard_error_of_that": round(error / blocking, 3),
        "lost_s": [round(s, 3) for s in lost_each],
        **{name: np.round(values, 3).tolist() for name, values in vars(measured).items() if isinstance(values, list)},
    }
    return Result(
        name="checkpoint_lost_time",
        value=lost,
        unit=f"s of training lost over the {steps} steps after an asynchronous checkpoint",
        ratio=round(lost / blocking, 3),
        target=TARGET_LOST,
        holds=lost / blocking <= TARGET_LOST,
        against="the same checkpoint, waited for",
        detail=detail,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="measured rounds (default: 25)")
    parser.add_argument("--steps", type=int, default=2, help="steps with and without a checkpoint (default: 2)")
    parser.add_argument(
        "--directory", type=Path, help="where checkpoints are written (default: the temporary directory)"
    )
    args = parser.parse_args()
    if args.repeats < 2 or args.steps < 1:
        parser.error(f"--repeats {args.repeats} --steps {args.steps}: expected at least 2 and 1")

    prepare_ray_environment(None, max(1, (os.cpu_count() or 1) // SHARDS), deterministic=False)
    load_before = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=args.directory) as directory,
        tempfile.TemporaryDirectory(prefix="tr-") as temp_dir,
    ):
        root = Path(directory)
        parameters = make_model(root / "model")
        with trainer(root / "model", Path(temp_dir)) as group:
            measured = measure(Run(group, root), args.repeats, args.steps)
    result(measured, parameters, args.steps, load_before).print()


if __name__ == "__main__":
    main()
