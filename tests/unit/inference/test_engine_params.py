"""What vLLM's own `SamplingParams` refuse, field by field, against our table of bounds."""

import math
from typing import Any

import numpy as np
import pytest
import vllm
from bounds_support import inside, outside
from vllm.exceptions import VLLMValidationError

from inference.engine import vllm_params
from trireme.core.sampling_bounds import BOUNDS, MOST_ANSWERS, MOST_SAMPLES
from trireme.core.types import SampleRequest, SamplingParams

PASSED_ON = {"max_tokens", "seed", "stop", "stop_token_ids", "prompt_logprobs"}
"""Fields that requests decide, and that are no numbers with two bounds."""
OURS = {
    "include_stop_str_in_output",
    "logprobs",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "output_kind",
    "skip_clone",
}
"""Fields to which `vllm_params` gives values that no request decides."""
DERIVED = {"_all_stop_token_ids", "output_text_buffer_length", "skip_reading_prefix_cache"}
"""Fields that vLLM makes of others."""
DEFAULTS = {
    "n",
    "extra_args",
    "presence_penalty",
    "frequency_penalty",
    "watermarking",
    "ignore_eos",
    "min_tokens",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "spaces_between_special_tokens",
    "stream_interval",
    "_eos_token_id",
    "_watermarking_skipped",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "_bad_words_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
}
"""Fields that keep vLLM's defaults: every door refuses them by name."""
NARROWER = {("repetition_penalty", "least"), ("repetition_penalty", "most"), ("top_k", "most")}
"""Bounds within vLLM's: their reasons are in the table."""


def test_each_field_of_vllm_is_bounded_given_or_left() -> None:
    fields = list(vllm.SamplingParams.__struct_fields__)
    assert sorted([*BOUNDS, *PASSED_ON, *OURS, *DERIVED, *DEFAULTS]) == sorted(fields)


def test_what_is_left_has_vllms_default() -> None:
    params = SamplingParams(9, 0.7, 0.8, 5, 0.1, 1.2, ("a", 3), 11)
    params_of_vllm = vllm_params(SampleRequest("r", np.ones(3, np.int32), params, "", True, 3), [2])
    default = vllm.SamplingParams()
    assert {name for name in DEFAULTS if getattr(params_of_vllm, name) != getattr(default, name)} == set()


@pytest.mark.parametrize("name", BOUNDS)
def test_vllm_takes_what_the_table_takes_and_refuses_what_is_just_outside(name: str) -> None:
    values: dict[str, Any] = {}
    for value in inside(name).values():
        values[name] = value
        vllm.SamplingParams(**values)
    for edge, value in outside(name).items():
        values[name] = value
        if (name, edge) in NARROWER:
            vllm.SamplingParams(**values)
        else:
            with pytest.raises(VLLMValidationError):
                vllm.SamplingParams(**values)


def test_vllm_refuses_what_every_door_refuses_and_takes_as_many_answers() -> None:
    wrong = {"max_tokens": 0, "stop": [""], "prompt_logprobs": -2, "n": 0, "temperature": math.nan}
    for name, value in wrong.items():
        with pytest.raises(VLLMValidationError):
            vllm.SamplingParams(**{name: value})
    for count in (MOST_ANSWERS, MOST_SAMPLES):
        vllm.SamplingParams(n=count)
