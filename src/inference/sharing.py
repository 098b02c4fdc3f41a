"""A scheduler that accounts an engine's time by purpose, and leaves chats out of steps while they have had their share.

Chats that are left out keep their places and their KV cache, and lose nothing but time. vLLM's own scheduler skips a
running request until the step `next_decode_eligible_step`, and leaves a waiting one where it is while
`_handle_blocked_waiting_request` is false: both are what it does for requests that wait for something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from inference.chat_share import SHARE, ChatShare, EngineClock, with_uses
from inference.marks import chat_cpu_s
from trireme.core.engine_use import Purpose

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

IDLE_S = 0.005
"""The longest sleep of an engine that has only chats that must wait: a request of the run may wait for its end."""


class SharingScheduler(Scheduler):
    """Bounds chats by `service.share` of the engine's time."""

    _scheduled: Mapping[str, int] = MappingProxyType({})  # the tokens of the last step by request; it may be in flight
    _chats_wait = False

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
            wait_s = self._share.wait_s(now)
            self._chats_wait = wait_s > 0
            if self._chats_wait:
                now = self._leave_chats_out(now, wait_s)
        self._clock.begin(now)
        made = super().schedule(throttle_prefills)
        self._scheduled = made.num_scheduled_tokens
        return made

    def _leave_chats_out(self, now: float, wait_s: float) -> float:
        """Keeps chats out of the next step. Returns the time, after a sleep if the engine has nothing else to do."""
        chats = [self.requests[name] for name in self._chats if name in self.requests]
        if len(chats) == len(self.requests) and self.pause_state is PauseState.UNPAUSED:
            self._clock.stand_still()
            time.sleep(min(wait_s, IDLE_S))
            now = time.monotonic()
        for chat in chats:
            chat.next_decode_eligible_step = max(chat.next_decode_eligible_step, self.current_step + 2)
        return now

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if self._chats_wait and request.request_id in self._chats:
            return False
        return super()._handle_blocked_waiting_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        scheduled, total = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        of_chats = sum(scheduled.get(name, 0) for name in self._chats)
        made = super().update_from_output(scheduler_output, model_runner_output)
        tokens: dict[Purpose, int] = {"run": total - of_chats, "chat": of_chats}
        parts = self._clock.end(time.monotonic(), tokens, busy=any(self.get_request_counts()))
        if chats := parts.get("chat"):
            self._share.charge(chats.seconds)
        for message in made.values():
            if message.scheduler_stats is not None:
                message.scheduler_stats = with_uses(message.scheduler_stats, self._clock.uses)
        return made

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state is PauseState.UNPAUSED:  # until now the engine stood still
            self._clock.stand_still()
