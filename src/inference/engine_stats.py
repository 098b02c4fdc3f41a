"""Reports how busy a replica's engine is, from the statistics that vLLM's scheduler sends with every step's tokens.

Asking the engine instead would wait for the step in progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from trireme.core.sampler import ReplicaStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EngineStats(PrometheusStatLogger):
    """Keeps the newest statistics of vLLM's engine. Derives from the Prometheus logger only so that vLLM adds no
    Prometheus logger of its own, which would record every token of every sequence in histograms that nothing reads."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self.steps = 0
        """Steps with results that the engine has run."""
        self.running = 0
        self.places: int | None = None
        """Sequences that the engine decodes at the same time."""
        self.kv_used = 0.0
        self.preemptions = 0
        self._excused = 0
        self._heard = time.monotonic()
        self.answered: Callable[[float], None] = lambda _silent_s: None
        """Called when a step has ended, with the seconds since the engine answered before."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        self.steps += 1
        self.answered(self.silent_s)
        self.listen()
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.kv_used = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            excused = min(iteration_stats.num_preempted_reqs, self._excused)
            self._excused -= excused
            self.preemptions += iteration_stats.num_preempted_reqs - excused

    def cache_cleared(self, unfinished: int) -> None:
        """Records that an update has cleared the KV cache. vLLM then reports each running sequence as preempted when it
        reports the sequence's next tokens. These preemptions do not count here, because they do not show a lack of
        space. `unfinished`: the number of sequences that the engine was given and has not finished."""
        self._excused = min(self._excused + self.running, unfinished)
        self.running = 0
        self.kv_used = 0.0

    def listen(self) -> None:
        """Restarts the clock of `silent_s`. Call it when the engine has answered, or gets work after it had none."""
        self._heard = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the engine answered, or since `listen`."""
        return time.monotonic() - self._heard

    def stats(self, unfinished: int) -> ReplicaStats:
        """Returns how busy the engine was at its last step: the running and waiting sequences, the share of the KV
        cache in use, and the number of preemptions so far. `unfinished`: the number of sequences that the engine was
        given and has not finished."""
        running = min(self.running, unfinished)
        waiting = unfinished - running
        return ReplicaStats(running, waiting, self.kv_used, self.preemptions, self.places)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass
