"""A scheduler that keeps tokens back for a moment, so that an engine sends few messages.

    step ---> tokens of all requests ---> held ---(requests have ended; some time is over; a pause)---> one message

vLLM's engine sends a message for each step, in which every request has an object with three arrays for one token. With
short steps, writing and reading these took a third of a replica's CPU time. Callers need a request's tokens only when
it ends, or about once a second. Ends wait for each other too, for a small share of the time that their requests have
taken: a message costs the engine, the replica's actor and the orchestrator. All held outputs are sent before a pause:
weights change in pauses only, and a message names the weights of all its tokens.

vLLM imports this module in the engine's process because the replica names one of its schedulers (`scheduler_cls`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from inference.engine import READ

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

READ_S = 0.05
UNREAD_S = 0.25
"""The longest that a token waits for others. While a client streams an answer: as long as between two pieces that a
person reads; else only ends are waited for, and all outputs are checked once a second."""
END_SHARE = 0.05
END_S = 0.1
"""The longest that an end waits for others: this share of the time since the first token, and at most END_S."""


class HeldOutputs:
    """Holds back outputs of vLLM's engine, and joins the outputs of each request into one."""

    def __init__(self) -> None:
        self._held_outputs: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        self._first_at: dict[str, float] = {}  # when the first token of each running request came that may wait
        self._ends: list[str] = []
        self._due = inf  # when the first of these must go

    def __bool__(self) -> bool:
        return bool(self._held_outputs)

    @property
    def has_ends(self) -> bool:
        return bool(self._ends)

    def pass_on(
        self, outputs: Iterable[EngineCoreOutput], may_wait: Callable[[str], bool], now: float
    ) -> list[EngineCoreOutput]:
        """Takes the outputs of a step at time `now`. Returns the outputs that must not wait, each joined with the held
        outputs of its request. `may_wait` is called with a request's id at its first output, and says if this
        request may wait."""
        going = []
        for output in outputs:
            name = output.request_id
            first_at = self._first_at.get(name)
            if can_wait(output) and (first_at is not None or may_wait(name)):
                if first_at is None:
                    self._first_at[name] = now
                self._held_outputs[name].append(output)
            elif first_at is not None and is_plain_end(output):
                self._held_outputs[name].append(output)
                self._ends.append(name)
                self._due = min(self._due, now + min(END_SHARE * (now - self._first_at.pop(name)), END_S))
            else:
                self._first_at.pop(name, None)
                going.append(joined([*self._held_outputs.pop(name, ()), output]))
        return going

    def take_ended(self, now: float) -> list[EngineCoreOutput]:
        """Returns and removes the outputs of all requests that have ended, if one of them has waited its longest by
        `now`; else []."""
        if now < self._due:
            return []
        ends = self._ends
        self._ends = []
        self._due = inf
        return [joined(self._held_outputs.pop(name)) for name in ends]

    def take(self, running: Container[str]) -> list[EngineCoreOutput]:
        """Returns and removes all held outputs. `running`: ids of the requests that may have more; the others are
        forgotten."""
        outputs_of = self._held_outputs
        self._held_outputs = defaultdict(list)
        self._ends = []
        self._due = inf
        self._first_at = {
            name: first_at for name, first_at in self._first_at.items() if name in running
        }  # others were aborted
        return [joined(outputs) for outputs in outputs_of.values()]


def can_wait(output: EngineCoreOutput) -> bool:
    """Returns True if an output may be held back: it is not the last of its request, and has only what `joined`
    keeps."""
    return output.finish_reason is None and has_tokens_alone(output)


def is_plain_end(output: EngineCoreOutput) -> bool:
    """Returns True if an output is the last of its request, and has only what `joined` keeps."""
    return output.finish_reason is not None and has_tokens_alone(output)


def has_tokens_alone(output: EngineCoreOutput) -> bool:
    """Returns True if an output has tokens and nothing that `joined` would lose."""
    return (
        output.pooling_output is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
        and output.prompt_token_id_logprobs is None
    )


def joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Returns one output that stands for `outputs` of one request, in their order. All but the last satisfy
    `can_wait`."""
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
    """Returns one request's logprobs of several steps, joined; None if `parts` is empty.

    A step has as many columns as its most demanding request needs; this request's logprobs are the first columns of
    each.
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
    """vLLM's scheduler with held outputs: sends a message for ended requests, for outputs that may not wait, and for
    all outputs after `longest_wait_s`."""

    _all_sent = 0.0

    @cached_property
    def _held_outputs(self) -> defaultdict[int, HeldOutputs]:  # by client
        return defaultdict(HeldOutputs)

    @cached_property
    def _read(self) -> set[str]:  # requests whose tokens are read while they are sampled
        return set()

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and READ in (params.extra_args or {}):
            self._read.add(request.request_id)
        super().add_request(request)

    @property
    def longest_wait_s(self) -> float:
        """The longest time in seconds that a token is held back; shorter while some request's tokens are read as they
        are sampled."""
        self._read.intersection_update(self.requests)
        if self._read:
            return READ_S
        return UNREAD_S

    def has_requests(self) -> bool:
        """Returns True while the engine has to make a step. This includes an empty step, to send held outputs when no
        other step follows."""
        clients = self._held_outputs.values()
        return (
            super().has_requests() or (self._is_paused and any(clients)) or any(client.has_ends for client in clients)
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        messages = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        sends_all = self._is_paused or now - self._all_sent >= self.longest_wait_s
        for client, step in messages.items():
            step.outputs = self._held_outputs[client].pass_on(step.outputs, self._may_wait, now)
        due_by = now if self.has_unfinished_requests() else inf  # without any, no step follows
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
        """Returns True if the caller needs only the final answer of this request, and the engine's scheduler itself
        finds its end (no stop strings)."""
        params = self.requests[request_id].sampling_params
        return params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop


class CoalescingAsyncScheduler(CoalescingScheduler, AsyncScheduler):
    """Holds outputs back as CoalescingScheduler does, on vLLM's asynchronous scheduler, which prepares a step while the
    engine computes the previous one."""
