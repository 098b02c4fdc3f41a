"""The orchestrator as a Ray actor: wires the pipeline to its parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.advantages import Keep, keep_whole
from orchestrator.agents import agent_sessions
from orchestrator.env import load_datasets
from orchestrator.pipeline import Pipeline
from orchestrator.rollout import RolloutLimits
from orchestrator.state import OrchestratorState
from orchestrator.workers import workers
from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.parts import CheckpointSource, PartReader
from trireme.config import Config
from trireme.core.actors import remote_method
from trireme.core.agents import AgentSessions
from trireme.core.batch import Assign, StoredBatch
from trireme.core.sampler import Heartbeat, MakeSampler
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import Minibatch, StepSummary, WeightIdentity
from trireme.process import signals, trace
from trireme.process.collector import spare_collector
from trireme.process.environ import redirect_output
from trireme.process.faults import fault_point, number_process


class OrchestratorActor:
    """The Ray actor of the orchestrator: samples rollouts, and builds the minibatches that the trainer trains on. All
    methods run on one event loop. The driver calls `start` before all other methods."""

    def __init__(
        self,
        config: Config,
        make_sampler: MakeSampler,
        assign: Assign | None,
        log_dir: Path | None,
        sessions_factory: Callable[[], AgentSessions] | None = None,
    ) -> None:
        # Here, because code that only builds a pipeline needs no Ray.
        from trireme.process.ray_cluster import see_own_gpus

        see_own_gpus()
        self._resources = AsyncExitStack()
        redirect_output(log_dir, "orchestrator_0")
        number_process(0)
        trace.start(log_dir, "orchestrator_0", config.trace.max_mb)
        self._config = config
        self._make_sampler = make_sampler
        self._sessions_factory = sessions_factory
        self._keep = store_parts(assign) if assign else keep_whole
        self._stopping: asyncio.Task[None] | None = None

    @remote_method
    async def start(self) -> None:
        """Starts the worker processes, loads tokenizer and datasets, and builds the pipeline. Raises BadInput."""
        fault_point("orchestrator.start")

        config = self._config
        tokenizer = load_tokenizer(config.tokenizer_name)
        await self._resources.enter_async_context(workers(config.orchestrator.workers, config.env_variables))
        if self._sessions_factory:
            await self._resources.enter_async_context(agent_sessions(self._sessions_factory))
        trained, held_out = load_datasets(config, tokenizer)
        self._pipeline = Pipeline(
            config,
            trained,
            self._make_sampler,
            RolloutLimits.of(config, tokenizer.decode),
            held_out,
            tokenizer.decode,
            self._keep,
        )
        signals.end_after(self.stop)
        spare_collector()

    @remote_method
    async def end_version(self) -> None:
        await self._pipeline.end_version()

    @remote_method
    async def begin_version(self, identity: WeightIdentity) -> None:
        """Lets the pipeline begin the version of the weights `identity`, and wait for the replicas' update to these
        weights (see `Pipeline.begin_version`). Does not start the update."""
        await self._pipeline.begin_version(identity.version, self._pipeline.sampler.updated(identity))

    @remote_method
    async def follow(self, source: Any) -> None:
        """Switches sampling to the replicas of a new replica set, which replaces the previous set. `source`: the object
        through which a router reads the new set."""
        self._pipeline.sampler.follow(source)

    @remote_method
    async def finish_sampling(self) -> None:
        await self._pipeline.finish_sampling()

    @remote_method
    async def next_minibatch(self, step: int, substep: int) -> Minibatch:
        return await self._pipeline.next_minibatch(step, substep)

    @remote_method
    async def evaluate(self, version: int, lines: Sequence[str]) -> dict[str, float]:
        return await self._pipeline.evaluate(version, lines)

    @remote_method
    async def take_evaluated(self) -> list[str]:
        """Returns a line of JSON for each group of the running evaluation that has ended since the last call."""
        return self._pipeline.evaluator.take_lines()

    @remote_method
    async def give_up_evaluation(self) -> None:
        self._pipeline.evaluator.give_up()

    @remote_method
    async def progress(self) -> str:
        """Returns a text for people that says how far the step or the evaluation is."""
        return self._pipeline.progress()

    @remote_method
    async def heartbeat(self) -> Heartbeat:
        """Returns the id of this process and of its node; an answer shows that the event loop runs."""
        import ray  # here, because code that only builds a pipeline needs none

        return Heartbeat((os.getpid(),), ray.get_runtime_context().get_node_id())

    @remote_method
    async def release(self, step: int) -> StepSummary:
        return self._pipeline.release(step)

    @remote_method
    async def take_snapshot(self) -> None:
        """Keeps in memory the state of the last boundary between two steps, for `write_snapshot`."""
        self._snapshot = self._pipeline.snapshot()

    @remote_method
    async def write_snapshot(self, path: Path) -> list[FileRecord]:
        """Writes the state that `take_snapshot` stored to directory `path`, in a thread. Returns the records of the
        written files. Raises StorageFailed."""

        def write() -> list[FileRecord]:
            fault_point("orchestrator.save")
            return self._snapshot.write(path)

        return await asyncio.to_thread(write)

    @remote_method
    async def load_state(self, path: Path, source: CheckpointSource | None = None) -> str:
        """Continues from the state that `write_snapshot` wrote to directory `path`. If this node cannot see `path`,
        reads the state from the object storage `source`. Returns a message that says how many unfinished rollouts
        continue; "" if the state has none."""

        def read() -> OrchestratorState:
            with PartReader.opened(path, source) as part:
                part.fetch_all()
                return OrchestratorState.read(part.directory)

        return self._pipeline.load(await asyncio.to_thread(read))

    @remote_method
    async def stop(self) -> None:
        """Cancels all rollouts and closes their environments. May be called twice, by the handler of SIGTERM and by the
        driver: a later call waits until the first call has ended."""
        self._stopping = self._stopping or asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await self._pipeline.stop()
        await self._resources.aclose()
        trace.stop()


def store_parts(assign: Assign) -> Keep:
    """Returns a `Keep` function that puts the tokens of a minibatch into Ray's object store, as one part for each
    process of the trainer. `assign` says which datums each process computes."""
    import ray  # here, because code that only builds a pipeline needs none

    return partial(StoredBatch.store, assign=assign, put=ray.put, owner="orchestrator")
