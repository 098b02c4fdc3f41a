"""One inference replica: an async Ray actor around one vLLM engine, with the same code on CPUs and GPUs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import psutil
import ray

from inference.desk import Desk
from inference.engine import end_of_sequence_ids, start_engine
from inference.loaded import LoadedProof
from inference.messages import Reply
from inference.session import Broadcasts
from inference.stalls import StallClock
from inference.updating import UpdatingEngine
from trireme.config import Config
from trireme.core.base_digest import base_digest
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat, ReplicaStats
from trireme.core.transport import load_transport
from trireme.core.types import SampleRequest, SamplingParams, WeightIdentity
from trireme.process import trace
from trireme.process.collector import spare_collector
from trireme.process.environ import end_of_far_log, redirect_output
from trireme.process.faults import fault_point, number_process
from trireme.process.ray_cluster import see_own_gpus

if TYPE_CHECKING:
    from inference.engine_stats import EngineStats

WARM_UP = SampleRequest("warm-up", np.zeros(2, np.int32), SamplingParams(max_tokens=2, seed=0), "")
GONE_S, GONE_TICK_S = 30.0, 0.02
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaInfo:
    """A living replica."""

    engine_pid: int
    """Process id of its engine."""
    ranks: tuple[int, ...]
    """Process ids of the engine's ranks, in order; one that is alone is the engine's process itself."""
    identity: WeightIdentity | None
    """The weights that it samples from; None before the first update."""


class ReplicaActor(UpdatingEngine):
    """One replica (many concurrent calls). `start` must have answered before any other verb.

    After WeightsRefused, a failed update or the death of the engine every further verb raises with the reason. The
    replica must then be replaced: a failed update is never repeated. Where `has_lost_engine`, `restart` does that.
    """

    def __init__(self, config: Config, index: int, log_dir: Path | None) -> None:
        see_own_gpus()
        self.index = index
        super().__init__(config, f"inference replica {index}")
        self._log_dir = log_dir
        self._watched: list[int] = []  # descriptors of the ranks' processes
        self.base: str | None = None
        self.broadcasts = Broadcasts(load_transport(config.transport).make_receiver(), self._receive_broadcast)
        self.updating = asyncio.Lock()
        self._desk = Desk(self.sample, self._failure)
        self.proof = LoadedProof(self.name)
        redirect_output(log_dir, f"inference_{index}")
        number_process(index)
        trace.start(log_dir, f"inference_{index}", config.trace.max_mb)

    async def has_lost_engine(self) -> bool:
        """Tells if a process of the engine died under this one, or stood still and was killed."""
        # a call may fail before vLLM notices the death
        return self.engine_killed or self.engine.errored or any(map(has_ended, (self._engine_pid, *self.ranks)))

    async def restart(self) -> ReplicaInfo:
        """Starts an engine in place of one that was lost: most of a start is importing vLLM, which is done."""
        log.info("process %d starts another engine for %s", os.getpid(), self.name)
        lost = {self._engine_pid, *self.ranks}
        self._forget_ranks()
        self.broadcasts.lose_engine()
        self._give_up_all()
        self._engine_process.kill()  # one that is stopped would hold up the next call
        await self._await_end(lost)
        self.broken = self.broken or RoomFailed(f"{self.name}: its engine process died")
        async with self.updating:  # an update of the lost engine ends first: it would take the next one for its own
            self.engine.shutdown()
            super().__init__(self.config, self.name)  # the state of an engine without requests and weights
            self.proof = LoadedProof(self.name)
            return await self.start()

    async def _await_end(self, pids: Iterable[int]) -> None:
        """Waits for the processes of the engine that was lost to free their memory: there is none for both."""
        for pid, gone in zip(pids, await asyncio.gather(*map(_gone, pids)), strict=True):
            if not gone:
                log.warning(
                    "waited %g s for process %d, of %s's lost engine, to end and free its memory; starting beside it",
                    GONE_S,
                    pid,
                    self.name,
                )

    async def start(self) -> ReplicaInfo:
        """Starts the engine and samples once: the first logprobs compile a function that a request would wait for."""
        with self._log_in_errors():
            return await self._start()

    async def _start(self) -> ReplicaInfo:
        fault_point("inference.start")
        log.info("importing vLLM and loading %s", self.config.model.name)
        self.engine = start_engine(self.config, self.name)
        log.info("sampling for the first time")
        assert self.engine.logger_manager is not None
        (self.engine_stats,) = cast("list[EngineStats]", self.engine.logger_manager.stat_loggers)
        self.engine_stats.places = self.engine.vllm_config.scheduler_config.max_num_seqs
        self.end_ids = end_of_sequence_ids(self.engine)
        self.vocab_size = self.engine.model_config.get_vocab_size()
        if self.config.trainer.lora.on:
            self.base = await asyncio.to_thread(base_digest, self.config.model.name)
        await (await self._submit(WARM_UP, salt="warm-up")).get()
        self.ranks = tuple(await self._in_engine("settle"))
        self._stalls = StallClock(self._cpu_s)  # before there was one process to look at, the engine's own
        self._watch_ranks()
        self.engine_stats.answered = self.note_step  # from now on: the first steps of all are slow
        self.proved.set()
        spare_collector()  # its passes over the same objects took nearly a quarter of this thread's time
        self.node = ray.get_runtime_context().get_node_id()
        log.info("ready")
        return await self.health()

    async def health(self) -> ReplicaInfo:
        """Raises RoomFailed or WeightsRefused, with the reason, when this replica is broken."""
        self._raise_if_broken()
        return ReplicaInfo(self._engine_pid, self.ranks, self.identity)

    async def heartbeat(self) -> Heartbeat:
        """Answers immediately. Raises RoomFailed or WeightsRefused, with the reason, when this replica is broken, and
        when its engine has been silent for too long, which is killed then."""
        with self._log_in_errors():
            self._raise_if_broken()
        node = ray.get_runtime_context().get_node_id()
        others = [pid for pid in self.ranks if pid != self._engine_pid]
        return Heartbeat((os.getpid(), self._engine_pid, *others), node, *self.behind())

    async def exchange(self, caller: str, message: bytes) -> bytes:
        """Takes packed requests and returns a packed reply, with outcomes of any requests of this caller, as
        `inference.desk.Desk` does."""
        return await self._desk.exchange(caller, message)

    async def packed_progress(self, known: Mapping[str, int]) -> bytes:
        """Returns what `progress` does, packed as the outcomes of a reply."""
        return Reply(list((await self.progress(known)).items())).pack()

    async def stats(self) -> ReplicaStats:
        """Returns the utilisation at the engine's last step, and its weights. Raises RoomFailed or WeightsRefused when
        broken."""
        self._raise_if_broken()
        stats = self.engine_stats.stats(self.engine.get_num_unfinished_requests())
        return replace(stats, weights=self.identity)

    @contextmanager
    def _log_in_errors(self) -> Iterator[None]:
        """Adds the last lines of this process's log to an error of the block, where the driver does not see the log."""
        try:
            yield
        except Exception as error:
            lines = end_of_far_log(self._log_dir, f"inference_{self.index}")
            if not lines:
                raise
            if isinstance(error, TriremeError):
                raise type(error)(f"{error}; {lines}") from error
            raise RoomFailed(f"{self.name} raised {type(error).__name__}: {error}; {lines}") from error

    def _watch_ranks(self) -> None:
        """Makes the death of a rank the engine's. vLLM sees it too, but waits for ranks that wait for that one."""
        for rank, pid in enumerate(self.ranks):
            if pid != self._engine_pid:
                self._watched.append(descriptor := os.pidfd_open(pid))  # readable once the process has ended
                asyncio.get_running_loop().add_reader(descriptor, self._lost_rank, rank)

    def _lost_rank(self, rank: int) -> None:
        self._forget_ranks()
        if not has_ended(self._engine_pid):  # else its ranks died with it
            died = f"{self.name}: rank {rank} of its engine, process {self.ranks[rank]}, died"
            self.broken = self.broken or RoomFailed(died)
            log.error("%s; its engine, process %d, is killed", died, self._engine_pid)
            os.kill(self._engine_pid, signal.SIGKILL)  # and with it all ranks

    def _forget_ranks(self) -> None:
        while self._watched:
            asyncio.get_running_loop().remove_reader(descriptor := self._watched.pop())
            os.close(descriptor)

    async def stop(self) -> None:
        """Ends the engine process, if there is one: it may have failed to start."""
        self._forget_ranks()
        self.broadcasts.close()
        if hasattr(self, "engine"):
            self.engine.shutdown()
        trace.stop()


async def _gone(pid: int) -> bool:
    """Waits for this process to end; returns False after GONE_S."""
    deadline = time.monotonic() + GONE_S
    while not has_ended(pid):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(GONE_TICK_S)
    return True


def has_ended(pid: int) -> bool:
    """Tells whether a process has freed its memory and devices: its last thread does that, while it is a zombie as soon
    as its first thread has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True
