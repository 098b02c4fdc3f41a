"""A trainer and its replicas as a run has them, without an orchestrator: what each update does to answers in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpu_check.checks import Context, Failed, Figures
from gpu_check.shapes import SHAPES, make_model

if TYPE_CHECKING:
    from inference.sampling_client import SamplingClient
    from trainer.handle import TrainerHandle
    from trireme.config import Config
    from trireme.core.types import Datum, SampledSequence, SampleResponse
    from trireme.core.weights import Drift, UpdateReport

PROMPT = 24
ANSWER = 64
UPDATES = 3
STALE = "inference.decode@2=shifted"
"""Arms a fault for the second update: its decode steps use other weights than were loaded. An engine without CUDA
graphs proves its decode steps at the first two updates alone."""
LEARNING_RATE = 1e-3
TOKENIZER = str(Path(__file__).parents[2] / "assets" / "sort-base")
"""A tokenizer, without which a run is refused; it is never used, as prompts are tokens."""
GPU_SHARE = 0.4
"""Share of a GPU's memory that vLLM takes, so that a trainer also fits."""
PLAN_ERROR = 0.05
"""The share of the planned memory by which what a sleeping replica gives back may differ from the plan."""


class Rooms:
    """A trainer and a sampler with its replicas."""

    def __init__(
        self, config: Config, trainer: TrainerHandle, sampler: SamplingClient, shape: str, bound: Drift
    ) -> None:
        """`bound`: how far the log-probabilities of a replica may be from those of the trainer."""
        self.config = config
        self.trainer = trainer
        self.sampler = sampler
        self.bound = bound
        self.vocabulary = SHAPES[shape]["vocab_size"]
        self.version = -1
        self._rng = np.random.default_rng(0)

    def update(self) -> UpdateReport:
        """Publishes the trainer's weights as the next version and brings the replicas to it; returns the first one's
        report. The canary of each is compared on the way."""
        self.version += 1
        self._weights = self.trainer.publish_weights(self.version)  # the replicas' source lives as long as this
        return self.sampler.update_weights(self._weights)[0]

    def prompts(self, number: int, length: int = PROMPT) -> list[list[int]]:
        """Returns random prompts."""
        return self._rng.integers(2, self.vocabulary, (number, length)).tolist()

    def begin(self, prompts: Sequence[list[int]], tokens: int) -> list[Future[SampleResponse]]:
        """Begins an answer of n tokens to each prompt."""
        from trireme.core.types import ModelInput, SamplingParams

        params = SamplingParams(max_tokens=tokens, seed=0)
        return [self.sampler.sample(ModelInput.from_ints(prompt), 1, params) for prompt in prompts]

    def train(self, prompts: Sequence[list[int]], answers: Sequence[SampledSequence]) -> None:
        """Makes an update with random advantages, large enough that later logprobs differ."""
        from trireme.core.types import AdamParams

        data = [self._datum(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        self.trainer.forward_backward(data, "importance_sampling")
        self.trainer.optim_step(AdamParams(learning_rate=LEARNING_RATE), float(len(data) * ANSWER))

    def differences(self, prompts: Sequence[list[int]], answers: Sequence[SampledSequence]) -> Figures:
        """Compares answers of the newest version with the trainer's log-probabilities. Raises Failed beyond what the
        canary allows."""
        from trireme.core.weights import Drift

        data = [self._datum(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        output = self.trainer.forward(data)
        computed = np.split(output.logprobs, output.offsets[1:-1].astype(int))
        moved = np.concatenate(
            [
                np.abs(all_[-len(answer.logprobs) :] - answer.logprobs)
                for all_, answer in zip(computed, answers, strict=True)
            ]
        )
        drift = Drift(float(moved.mean()), float(moved.max()))
        if not (drift.mean <= self.bound.mean and drift.largest <= self.bound.largest):
            raise Failed(
                f"logprobs of replica and trainer differ by {drift.mean:.3g} in the mean and {drift.largest:.3g} at "
                f"most; expected at most {self.bound.mean:g} and {self.bound.largest:g}"
            )
        return {"replica against trainer, mean": drift.mean, "largest": drift.largest}

    def _datum(self, prompt: list[int], answer: SampledSequence) -> Datum:
        from trireme.core.types import Datum, ModelInput

        tokens = [*prompt, *answer.tokens.tolist()]
        observed = len(prompt) - 1
        advantages = self._rng.normal(size=len(answer.tokens))
        return Datum(
            ModelInput.from_ints(tokens[:-1]),
            {
                "target_tokens": tokens[1:],
                "mask": [0.0] * observed + [1.0] * len(advantages),
                "logprobs": [0.0] * observed + answer.logprobs.tolist(),
                "advantages": [0.0] * observed + advantages.tolist(),
            },
        )


@contextmanager
def open_rooms(context: Context, shape: str, *flags: str) -> Iterator[tuple[Rooms, float]]:
    """Starts a trainer and its replicas on a random model, with options of `rl`. Gives them, and the seconds that the
    start took."""
    from trireme import api
    from trireme.core.weights import EXACT, LEAST, ROUNDED

    if not context.on_gpu:
        bound = EXACT
    elif "num_experts" in SHAPES[shape]:
        bound = ROUNDED
    else:
        bound = LEAST
    model = make_model(context.directory / f"{shape} of rooms", shape, context.device)
    if shape.startswith("small"):
        length = SHAPES[shape]["max_position_embeddings"]
    else:
        length = 1024
    flags = (
        *("--model.name", model, "--model.tokenizer", TOKENIZER, "--model.max-seq-len", str(length)),
        *("--inference.sampling.max-tokens", str(ANSWER), "--timeouts.start-s", str(max(30.0, context.left_s))),
        *("--cluster.device", context.device),
        *(("--inference.gpu-memory-utilization", str(GPU_SHARE)) if context.on_gpu else ()),
        *flags,
    )
    config = api.loop_config(flags)
    started = time.monotonic()
    with api.open_rooms(config, context.directory / "logs") as (trainer, sampler):
        yield Rooms(config, trainer, sampler, shape, bound), time.monotonic() - started


def update_in_flight(rooms: Rooms, context: Context, requests: int) -> Figures:
    """Trains and updates several times while answers are sampled; then compares answers of the last version. Raises
    Failed when tokens are of no version, or of another than was published."""
    rooms.update()
    prompts = rooms.prompts(requests)
    answers = _results(rooms.begin(prompts, ANSWER), context)
    before = rooms.differences(prompts, answers)
    reports = []
    several = 0
    for _ in range(UPDATES):
        in_flight = rooms.begin(prompts, ANSWER)
        rooms.train(prompts, answers)
        reports.append(rooms.update())
        several += sum(len(answer.spans) > 1 for answer in _results(in_flight, context))
        answers = _results(rooms.begin(prompts, ANSWER), context)
        sampled_at = {span.identity.version for answer in answers for span in answer.spans}
        if sampled_at != {rooms.version}:
            raise Failed(f"after an update to version {rooms.version} tokens came from versions {sorted(sampled_at)}")
    return {
        **{f"{name}, version 0": value for name, value in before.items()},
        **{f"{name}, version {rooms.version}": value for name, value in rooms.differences(prompts, answers).items()},
        "s/update": float(np.median([report.seconds for report in reports])),
        "of which paused": float(np.median([report.pause_s for report in reports])),
        "answers of several versions": several,
        "canary, mean": max(report.drift.mean for report in reports),
    }


def take_turns(rooms: Rooms, context: Context, turns: int) -> Figures:
    """Puts the replica to sleep, trains, and wakes it by an update, `turns` times. Raises Failed if a replica
    that slept answers otherwise than before, with tokens of another version, or with other log-probabilities than the
    trainer's; and on a GPU if it gives back another amount of memory than is planned."""
    rooms.update()
    prompts = rooms.prompts(1)
    answers = _results(rooms.begin(prompts, ANSWER), context)
    rooms.sampler.sleep()
    rooms.update()
    again = _results(rooms.begin(prompts, ANSWER), context)
    if again[0].tokens.tolist() != answers[0].tokens.tolist():
        raise Failed(f"awake again it answers {again[0].tokens.tolist()}, before {answers[0].tokens.tolist()}")
    asleep_s, awake_s, freed = [], [], []
    for _ in range(turns):
        free = _free_bytes(context)
        started = time.monotonic()
        rooms.sampler.sleep()
        asleep_s.append(time.monotonic() - started)
        freed.append(_free_bytes(context) - free)
        rooms.train(prompts, answers)
        started = time.monotonic()
        rooms.trainer.free_memory()
        rooms.update()
        awake_s.append(time.monotonic() - started)
        answers = _results(rooms.begin(prompts, ANSWER), context)
        sampled_at = {span.identity.version for answer in answers for span in answer.spans}
        if sampled_at != {rooms.version}:
            raise Failed(f"after an update to version {rooms.version} tokens came from versions {sorted(sampled_at)}")
    planned = _planned_release(rooms.config) if context.on_gpu else 0
    if any(abs(number - planned) > PLAN_ERROR * planned for number in freed):
        sizes = ", ".join(f"{number / 2**30:.2f}" for number in freed)
        raise Failed(f"asleep it gave back {sizes} GiB, the plan has {planned / 2**30:.2f}")
    return {
        **rooms.differences(prompts, answers),
        "to sleep, s": float(np.median(asleep_s)),
        "publish and wake, s": float(np.median(awake_s)),
        "freed, GiB": float(np.median(freed)) / 2**30,
    }


def _free_bytes(context: Context) -> int:
    """Returns the free memory of the GPU; 0 on CPUs."""
    import torch

    return torch.cuda.mem_get_info()[0] if context.on_gpu else 0


def _planned_release(config: Config) -> int:
    """Returns the bytes that a replica gives back on a GPU when it sleeps, by the plan of a loop."""
    from trireme.config.model_facts import ModelFacts
    from trireme.plan.rl import LOOP_ROOMS
    from trireme.plan.whole import Plan
    from trireme.process.environ import Resources

    plan = Plan(config, ModelFacts.of(config, required=True), Resources.of_this_machine(), LOOP_ROOMS)
    (machine,) = plan.machines
    (need,) = (need for need in machine.actors.values() if need.gpu_share)
    return sum(need.gpu.values()) - sum((need.resting or need.gpu).values())


def refuse_stale_decoding(rooms: Rooms) -> Figures:
    """Updates twice, in rooms that were started with the fault STALE. Raises Failed unless the replica takes the first
    update and refuses the second."""
    from trireme.core.errors import WeightsRefused

    rooms.update()
    try:
        rooms.update()
    except WeightsRefused as refused:
        if "decode steps" in str(refused):
            return {}
        raise
    raise Failed("decode steps used other weights than were published, and the replica did not see it")


def tokens_per_second(rooms: Rooms, context: Context, requests: int, tokens: int) -> Figures:
    """Samples many answers side by side."""
    prompts = rooms.prompts(requests, 2 * PROMPT)
    _results(rooms.begin(prompts[: requests // 8], tokens), context)
    started = time.monotonic()
    answers = _results(rooms.begin(prompts, tokens), context)
    seconds = time.monotonic() - started
    count = sum(len(answer.tokens) for answer in answers)
    return {"tokens/s": count / seconds, "requests": requests, "tokens": count}


def _results(futures: Sequence[Future[SampleResponse]], context: Context) -> list[SampledSequence]:
    """Waits for answers; the part's own deadline names this check."""
    wait(futures, context.left_s)
    return [future.result(0).sequences[0] for future in futures]
