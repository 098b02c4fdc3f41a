"""What a run of `sft` will occupy and do, worked out before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config.refusals import Refusal
from trireme.config.sft import SftConfig
from trireme.plan.base import CommonPlan, count, gib, package_versions
from trireme.sft.data import Examples, SftData


@dataclass(frozen=True)
class SftPlan(CommonPlan):
    """`config` with the number of its steps; `data` none: it could not be read, in a dry run without a hub."""

    config: SftConfig
    data: SftData | None = None

    @property
    def actor_names(self) -> list[str]:
        return [f"trainer shard {r}" for r in range(self.config.trainer.processes)]

    @property
    def gpus_needed(self) -> int:
        return self.config.trainer.processes if self.on_gpus else 0

    def check_resources(self) -> None:
        """Raises BadInput when the run needs more GPUs than there are."""
        if self.gpus_needed <= self.resources.gpus:
            return
        raise Refusal(
            f"trainer.shards = {self.config.trainer.shards} x trainer.replicate = {self.config.trainer.replicate}, "
            f"which need {self.gpus_needed} GPUs",
            f"at most {self.resources.gpus} GPUs, which is what {self.resources.source} has",
            "lower them; or use a larger cluster; or --cluster.device cpu",
        ).error()

    @property
    def warnings(self) -> list[str]:
        found = self.common_warnings + (list(self.data.notes) if self.data else [])
        has, where, shards = self.resources, self.resources.source, self.config.trainer.processes
        if self.gpus_needed > has.gpus:
            found.append(f"needs {count(self.gpus_needed, 'GPU')}, {where} has {has.gpus}")
        if shards > has.cpus and not self.on_gpus:
            found.append(f"{shards} processes compute on {has.cpus} cores of {where}: it works, slower")
        needs = self.shard_memory.total * shards if self.shard_memory else 0
        if needs > has.memory_bytes and not self.on_gpus:
            found.append(f"needs about {gib(needs)} of memory, {where} has {gib(has.memory_bytes)}")
        return found

    def rows(self) -> list[tuple[str, str]]:
        share = "one GPU each" if self.on_gpus else "CPU"
        return [
            ("trainer", f"{self._trainer_text()}, {share}, {count(self.threads, 'thread')} each"),
            ("resources", self._resources_text()),
            ("packages", ", ".join(f"{name} {number}" for name, number in package_versions().items())),
            ("model", self._model_text()),
            *self._rows_of_adapters(),
            ("data", self._data_text()),
            ("steps", self._steps_text()),
            *self._rows_of_evaluation(),
            ("memory", self._shard_memory_text()),
            ("commits", self._commits_text()),
            ("recovery", self._recovery_text()),
            ("written to", self._written_text()),
            *(("warning", text) for text in self.warnings),
        ]

    def _data_text(self) -> str:
        options = self.config.data
        return f"{options.train}: " + (_examples_text(self.data.train) if self.data else "unknown, as the model is")

    def _steps_text(self) -> str:
        if self.data is None:
            return f"{self.config.data.batch_size} examples each"
        steps, size, each = self.config.max_steps, self.data.cursor.size, self.config.data.batch_size
        order = "a random order of its own each" if self.config.data.shuffle else "as they stand"
        epochs = min(steps * each, self.data.cursor.end or steps * each) / size
        return f"{steps} of {each} examples: {epochs:.4g} epochs, {order}"

    def _rows_of_evaluation(self) -> list[tuple[str, str]]:
        if self.data is None or self.data.test is None:
            return []
        every = count(self.config.eval.every, "step")
        return [("evaluation", f"{_examples_text(self.data.test)}: first of all, every {every}, and at the end")]


def _examples_text(examples: Examples) -> str:
    longest = max(end - start for start, end in zip(examples.offsets[:-1], examples.offsets[1:], strict=True))
    return (
        f"{len(examples):,} examples of {len(examples.tokens):,} tokens (the longest {longest}), "
        f"{examples.num_loss_tokens:,} of which are trained on"
    )
