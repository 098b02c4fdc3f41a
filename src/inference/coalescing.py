"""A scheduler that keeps tokens back for a moment, so that an engine sends few messages.

    step ---> tokens of all requests ---> held ---(requests have ended; some time is over; a pause)---> one message

vLLM's engine sends a message for each step, in which every request has an object with three arrays for one token. With
short steps, writing and reading these took a third of a replica's CPU time. Callers need a request's tokens only when
it ends, or about once a second. Ends wait for each other too, for a small share of the time that their requests took: a
message costs the engine, the replica's actor and the orchestrator CPU time, and where answers are short almost every
step ends one. All held outputs are sent before a pause: weights change in pauses only, and a message names the weights
of all its tokens.

vLLM imports this module in the engine's process because the replica names one of its schedulers (`scheduler_cls`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from inference.engine import RESERVED

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

HOLD_S = 0.1
"""Seconds that an output waits at most for others: as long as between two pieces of an answer that a person reads."""
END_SHARE = 0.05
"""The last output of a request waits at most this share of the time since the request's first token."""
FEW = 8
"""Ends do not wait while the engine has fewer requests than this."""


class HeldOutputs:
    """Holds back outputs of vLLM's engine, and joins the outputs of each request into one, so that the engine sends
    fewer messages. An output is held until its request has an output that may not wait, until the request has ended and
    `take_ended` returns it, or until `take` is called."""

    def __init__(self) -> None:
        self._held_outputs: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        self._first_at: dict[str, float] = {}  # when the first output of each running request came that could wait
        self._ended: list[str] = []
        self._due_at = math.inf  # when the first of the ended requests must be sent

    def __bool__(self) -> bool:
        return bool(self._held_outputs)

    @property
    def has_ended(self) -> bool:
        """True if outputs of a request that has ended are held back."""
        return bool(self._ended)

    def pass_on(
        self, outputs: Iterable[EngineCoreOutput], may_wait: Callable[[str], bool], now: float
    ) -> list[EngineCoreOutput]:
        """Takes the outputs of a step, and holds back the outputs that may wait. Returns the others, each joined with
        the held outputs of its request. `may_wait(request id)` returns True if outputs of this request may be held
        back; it is called for the first output of a request only. `now`: seconds."""
        going = []
        for output in outputs:
            name = output.request_id
            first_at = self._first_at.get(name)
            if not can_wait(output) or (first_at is None and (output.finished or not may_wait(name))):
                self._first_at.pop(name, None)
                going.append(joined([*self._held_outputs.pop(name, ()), output]))
                continue
            self._held_outputs[name].append(output)
            if first_at is None:
                self._first_at[name] = now
            elif output.finished:
                del self._first_at[name]
                self._ended.append(name)
                self._due_at = min(self._due_at, now + min(END_SHARE * (now - first_at), HOLD_S))
        return going

    def take_ended(self, now: float) -> list[EngineCoreOutput]:
        """Returns and removes the outputs of all requests that have ended, if one of them is due at `now`; else returns
        []."""
        if now < self._due_at:
            return []
        ended = self._ended
        self._ended = []
        self._due_at = math.inf
        return [joined(self._held_outputs.pop(name)) for name in ended]

    def take(self, running: Container[str]) -> list[EngineCoreOutput]:
        """Returns and removes all held outputs. `running`: the requests that can have further outputs."""
        outputs_of = self._held_outputs
        self._held_outputs = defaultdict(list)
        self._ended = []
        self._due_at = math.inf
        self._first_at = {name: first_at for name, first_at in self._first_at.items() if name in running}
        return [joined(outputs) for outputs in outputs_of.values()]


def can_wait(output: EngineCoreOutput) -> bool:
    """Returns True if an output may be held back: it has nothing that `joined` would lose."""
    return (
        output.pooling_output is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
        and output.prompt_token_id_logprobs is None
    )


def joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Joins `outputs`, successive outputs of one request, into one output. All but the last satisfy `can_wait`, and
    only the last may end the request."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [output.new_logprobs for output in outputs]
    prompts = (output.new_prompt_logprobs_tensors for output in outputs)
    whole = replace(
        outputs[-1],
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        new_logprobs=joined_logprobs([output for output in logprobs if output is not None]),
        new_prompt_logprobs_tensors=next((output for output in prompts if output is not None), None),
        events=[event for output in outputs if output.events for event in output.events] or None,
    )
    whole.prefill_stats = outputs[0].prefill_stats or whole.prefill_stats
    return whole


def joined_logprobs(parts: Sequence[LogprobsLists]) -> LogprobsLists | None:
    """Joins the logprobs of one request from several steps along the token axis. `parts`: the logprobs from each step.
    Returns None if `parts` is empty.

    In a step, all requests have the same number of columns: as many as the most demanding request needs. So the parts
    can differ in width. The request to be joined needs only the first columns of each part; the result has the width of
    the narrowest part.
    """
    if not parts:
        return None
    token_ids, logprobs, ranks, _ = zip(*parts, strict=True)
    if len(widths := {part.shape[1] for part in logprobs}) > 1:
        width = min(widths)
        token_ids = [part[:, :width] for part in token_ids]
        logprobs = [part[:, :width] for part in logprobs]
    return LogprobsLists(np.concatenate(token_ids), np.concatenate(logprobs), np.concatenate(ranks))


class CoalescingScheduler(Scheduler):
    """vLLM's scheduler, except for two things. It keeps a place in the batch free for the canary. And it holds back the
    outputs of requests, so that several travel in one message. When a request has an output that may not wait, its held
    outputs are sent. The outputs of ended requests are sent together, once one of them is due, or if the engine has
    fewer than FEW requests. At a pause, all held outputs are sent. Without a pause, all are sent at the end of a step
    once HOLD_S seconds have passed since all were last sent."""

    _all_sent = 0.0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedules a step. Only requests that go before all others, such as the canary of an update, get the last
        RESERVED places: in an engine that is always full, the canary would otherwise wait until another request
        ends."""
        is_urgent = bool(self.waiting) and self.waiting.peek_request().priority < 0
        if is_urgent:
            self.max_num_active_reqs = self.max_num_running_reqs
        else:
            self.max_num_active_reqs = max(1, self.max_num_running_reqs - RESERVED)
        return super().schedule(throttle_prefills)

    @cached_property
    def _held_outputs(self) -> defaultdict[int, HeldOutputs]:  # by client
        return defaultdict(HeldOutputs)

    def has_requests(self) -> bool:
        """Returns True while the engine has to make a step. This includes an empty step, to send held outputs when no
        other step follows."""
        held_outputs = self._held_outputs.values()
        if self._is_paused and any(held_outputs):
            return True
        return super().has_requests() or any(outputs.has_ended for outputs in held_outputs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        messages = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        sends_all = self._is_paused or now - self._all_sent >= HOLD_S
        for client, step in messages.items():
            step.outputs = self._held_outputs[client].pass_on(step.outputs, self._may_wait, now)
        if len(self.requests) >= FEW:
            due_by = now
        else:
            due_by = math.inf
        for client, held_outputs in self._held_outputs.items():
            if sends_all:
                outputs = held_outputs.take(self.requests)
            else:
                outputs = held_outputs.take_ended(due_by)
            if outputs:
                message = messages.setdefault(client, EngineCoreOutputs())
                message.outputs = [*message.outputs, *outputs]
        if sends_all:
            self._all_sent = now
        # what else a step sends is how busy the engine is, which the next message will say
        return {
            client: step for client, step in messages.items() if sends_all or step.outputs or step.finished_requests
        }

    @property
    def _is_paused(self) -> bool:
        return self.pause_state is not PauseState.UNPAUSED

    def _may_wait(self, request_id: str) -> bool:
        """Returns True if the caller needs only the final answer of this request, and the request has no stop strings,
        so that the engine's scheduler itself detects the end of the answer."""
        params = self.requests[request_id].sampling_params
        return params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop


class CoalescingAsyncScheduler(CoalescingScheduler, AsyncScheduler):
    """Holds outputs back as CoalescingScheduler does, on vLLM's asynchronous scheduler, which prepares a step while the
    engine computes the previous one."""
