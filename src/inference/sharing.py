"""A scheduler that accounts an engine's time by purpose, and leaves chats out of steps while they have had their share.

Chats that are left out keep their places and their KV cache, and lose nothing but time. vLLM's own scheduler skips a
running request until the step `next_decode_eligible_step`, and leaves a waiting one where it is while
`_handle_blocked_waiting_request` is false: both are what it does for requests that wait for something else.

vLLM's engine makes steps as long as it has requests, also where each of them waits and the steps are empty. An empty
step costs half a millisecond, so an engine that had only chats that must wait would use a sixth of a core for nothing.
Before it looks for requests it therefore rests until one comes, or until chats may be in a step.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
from vllm.v1.request import RequestStatus

from inference.chat_share import SHARE, ChatShare, EngineClock, EngineReport, with_report
from inference.marks import chat_cpu_s
from trireme.core.engine_use import Purpose

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

LONGEST_REST_S = 0.5
"""An engine makes a step, an empty one at least, as often as this: else it would look like one that stands still
(`inference.stalls`)."""


class SharingScheduler(Scheduler):
    """Bounds chats by `service.share` of the engine's time."""

    _scheduled: Mapping[str, int] = MappingProxyType({})  # the tokens of the last step by request; it may be in flight
    _chats_wait = False
    _preemptions = 0

    @cached_property
    def _clock(self) -> EngineClock:
        return EngineClock()

    @cached_property
    def _share(self) -> ChatShare:
        return ChatShare(float(os.environ.get(SHARE, "1")), time.monotonic())

    @cached_property
    def _chats(self) -> set[str]:
        return set()

    def add_request(self, request: Request) -> None:
        if (cpu_s := chat_cpu_s(request.sampling_params)) is not None:
            self._chats.add(request.request_id)
            self._share.charge(cpu_s)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now = time.monotonic()
        if self._chats:
            self._chats.difference_update(self._chats - self.requests.keys() - self._scheduled.keys())
            self._chats_wait = self._share.wait_s(now) > 0
            if self._chats_wait:
                self._leave_chats_out()
        self._clock.begin(now)
        made = super().schedule(throttle_prefills)
        self._scheduled = made.num_scheduled_tokens
        return made

    def _leave_chats_out(self) -> None:
        """Keeps chats out of the next step."""
        for name in self._chats & self.requests.keys():
            chat = self.requests[name]
            chat.next_decode_eligible_step = max(chat.next_decode_eligible_step, self.current_step + 2)

    def rest_s(self) -> float:
        """Returns for how many seconds the engine may rest: steps would be empty, as it has only chats that must wait.
        Not to be asked while a step is in flight."""
        if (
            self._chats.issuperset(self.requests)
            and self.has_unfinished_requests()
            and not self.has_finished_requests()
        ):
            return min(self._share.wait_s(time.monotonic()), LONGEST_REST_S)
        return 0.0

    def rest(self, inbox: queue.Queue[Any]) -> None:
        """Waits for as long as the engine may rest, or until there is something in `inbox`."""
        if (rest_s := self.rest_s()) <= 0:
            return
        self._clock.stand_still()
        with inbox.not_empty:
            if not inbox.queue:
                inbox.not_empty.wait(rest_s)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if self._chats_wait and request.request_id in self._chats:
            return False
        return super()._handle_blocked_waiting_request(request)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        if request.request_id not in self._chats:
            self._preemptions += 1

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        before = self._preemptions
        try:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        finally:
            self._preemptions = before  # these were not for lack of space

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        scheduled, total = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        of_chats = sum(scheduled.get(name, 0) for name in self._chats)
        made = super().update_from_output(scheduler_output, model_runner_output)
        tokens: dict[Purpose, int] = {"run": total - of_chats, "chat": of_chats}
        parts = self._clock.end(time.monotonic(), tokens, busy=any(self.get_request_counts()))
        if used := parts.get("chat"):
            self._share.charge(used.seconds)
        chats = (self.requests[name] for name in self._chats & self.requests.keys())
        chats_waiting = sum(chat.status is not RequestStatus.RUNNING for chat in chats)
        report = EngineReport(self._clock.uses, self._preemptions, chats_waiting)
        for message in made.values():
            if message.scheduler_stats is not None:
                message.scheduler_stats = with_report(message.scheduler_stats, report)
        return made

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state is PauseState.UNPAUSED:  # until now the engine stood still
            self._clock.stand_still()


def rest_before_requests() -> None:
    """Has each engine of this process rest (`SharingScheduler.rest`) before it looks for requests.

    vLLM gives schedulers no way to say that nothing can be done now: its loop waits for requests only where there are
    none (`EngineCoreProc._process_input_queue`). One of several that share experts is left as it is, as they make their
    steps together.
    """
    look: Callable[[EngineCoreProc], None] = EngineCoreProc._process_input_queue
    if hasattr(look, "__wrapped__"):
        return

    @wraps(look)
    def rest_and_look(engine: EngineCoreProc) -> None:
        scheduler = engine.scheduler
        alone = not isinstance(engine, DPEngineCoreProc)
        if alone and isinstance(scheduler, SharingScheduler) and not engine.batch_queue:
            scheduler.rest(engine.input_queue)
        look(engine)

    EngineCoreProc._process_input_queue = rest_and_look


rest_before_requests()
