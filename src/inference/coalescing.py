"""A scheduler that keeps tokens back for a moment, so that an engine sends few messages.

    step ---> tokens of all requests ---> held ---(a request ends; some time is over; a pause)---> one message

vLLM's engine sends a message for each step, in which every request has an object with three arrays for one token. To
write, read and enter these took a third of a replica's CPU time where steps are short. What a replica makes of them is
asked for when a request ends, or about once a second. Whatever a pause ends is sent before it: weights change in pauses
only, and a message names the weights of all its tokens.

vLLM imports this module in the engine's process because the replica names one of its schedulers (`scheduler_cls`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

READ_S, UNREAD_S = 0.05, 0.25
"""The longest that a token waits for others: where answers may be read while they are sampled, as long as between two
pieces that a person reads; elsewhere only their ends are waited for, and all is looked at once a second."""


class HeldOutputs:
    """Keeps outputs back, and joins those of a request to one."""

    def __init__(self) -> None:
        self._held: dict[str, list[EngineCoreOutput]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def pass_on(self, outputs: Iterable[EngineCoreOutput], may_wait: Callable[[str], bool]) -> list[EngineCoreOutput]:
        """Takes the outputs of a step. Returns what is to go now: the outputs of requests that have ended, or that may
        not wait, each with what was kept of its request. `may_wait` is asked about the first output of a request."""
        going = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if can_wait(output) and (held or may_wait(output.request_id)):
                self._held.setdefault(output.request_id, []).append(output)
            else:
                going.append(joined([*self._held.pop(output.request_id, ()), output]))
        return going

    def take(self) -> list[EngineCoreOutput]:
        """Returns all that is kept."""
        held, self._held = self._held, {}
        return [joined(outputs) for outputs in held.values()]


def can_wait(output: EngineCoreOutput) -> bool:
    """Tells if an output has tokens and nothing that `joined` would lose."""
    others = (
        output.finish_reason,
        output.pooling_output,
        output.kv_transfer_params,
        output.ec_transfer_params,
        output.routed_experts,
        output.new_sampling_mask,
        output.prompt_token_id_logprobs,
    )
    return all(each is None for each in others)


def joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Returns one output for those of a request, in their order, of which all but the last could wait."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [each.new_logprobs for each in outputs]
    prompts = (each.new_prompt_logprobs_tensors for each in outputs)
    whole = replace(
        outputs[-1],
        new_token_ids=list(chain.from_iterable(each.new_token_ids for each in outputs)),
        new_logprobs=joined_logprobs([each for each in logprobs if each is not None]),
        new_prompt_logprobs_tensors=next((each for each in prompts if each is not None), None),
        events=[event for each in outputs for event in each.events or ()] or None,
    )
    whole.prefill_stats = outputs[0].prefill_stats or whole.prefill_stats
    return whole


def joined_logprobs(parts: Sequence[LogprobsLists]) -> LogprobsLists | None:
    """Returns the logprobs of several steps; None if they have none.

    A step has as many columns as any of its requests has asked for, so those of this one are the first of each.
    """
    if not parts:
        return None
    width = min(part.logprobs.shape[1] for part in parts)
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids[:, :width] for part in parts]),
        np.concatenate([part.logprobs[:, :width] for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )


class CoalescingScheduler(Scheduler):
    """Sends what has ended, what may not wait, and all after its longest wait."""

    longest_wait_s = UNREAD_S

    _all_sent = 0.0

    @cached_property
    def _held(self) -> defaultdict[int, HeldOutputs]:  # by client
        return defaultdict(HeldOutputs)

    def has_requests(self) -> bool:
        """True while the engine is to make a step; a paused one makes an empty step for what is held."""
        return super().has_requests() or (self._is_paused and any(self._held.values()))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        made = super().update_from_output(scheduler_output, model_runner_output)
        sends_all = self._is_paused or time.monotonic() - self._all_sent >= self.longest_wait_s
        for client, step in made.items():
            step.outputs = self._held[client].pass_on(step.outputs, self._may_wait)
        if sends_all:
            for client, held in self._held.items():
                if outputs := held.take():
                    message = made.setdefault(client, EngineCoreOutputs())
                    message.outputs = [*message.outputs, *outputs]
            self._all_sent = time.monotonic()
        # what else a step sends is how busy the engine is, which the next message will say
        return {client: step for client, step in made.items() if sends_all or step.outputs or step.finished_requests}

    @property
    def _is_paused(self) -> bool:
        return self.pause_state is not PauseState.UNPAUSED

    def _may_wait(self, request_id: str) -> bool:
        """Tells if only the end of this request is waited for, and the engine's scheduler finds it."""
        params = self.requests[request_id].sampling_params
        return params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop


class CoalescingAsyncScheduler(CoalescingScheduler, AsyncScheduler):
    """Coalesces outputs where vLLM prepares a step while the one before it is computed."""


class ReadCoalescingScheduler(CoalescingScheduler):
    """Is for answers that may be read while they are sampled."""

    longest_wait_s = READ_S


class ReadCoalescingAsyncScheduler(CoalescingAsyncScheduler):
    """Is for answers that may be read while they are sampled."""

    longest_wait_s = READ_S
